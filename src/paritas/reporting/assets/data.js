// The rows, as columns: `text.name(5)` and `numbers.rel_l2[5]` are of row 5. No row is an object.

const SIGNS = { identical: "=", equivalent: "≈", unstable: "~", unverified: "?", degraded: "▼", different: "≠" };

async function unpack(element) {
  const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return decode(await new Response(plain).json());
}

function decode(raw) {
  const text = {};
  const numbers = {};
  for (const [name, column] of Object.entries(raw.texts)) {
    const { texts, rows } = column;
    text[name] = rows ? (row) => texts[rows[row]] : () => texts[0];
  }
  for (const [name, column] of Object.entries(raw.numbers)) {
    // NaN is a figure here, and a bad one; a missing figure is null.
    numbers[name] = column ? column.map(spelled) : new Array(raw.count).fill(null);
  }
  return { ...raw, columns: raw.texts, text, numbers };
}

function spelled(value) {
  if (typeof value !== "string") return value;
  return value === "nan" ? NaN : value === "inf" ? Infinity : -Infinity;
}

// Four digits, always of one kind within a size, so that columns line up.
function figure(value) {
  if (value === null || value === undefined) return "";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
  if (size >= 1e-3 && size < 1e5) return String(Number(value.toPrecision(4)));
  return exponential(value);
}

// For columns that are read by their magnitude.
function exponential(value) {
  if (value === null || value === undefined || !Number.isFinite(value) || value === 0) return figure(value);
  return value.toExponential(2).replace("e+", "e");
}

function statusWord(data, row) {
  return data.statuses[data.status[row]];
}

// Mine and golden, as one where they agree.
function bothSides(data, what, row) {
  const mine = data.text[`my_${what}`](row);
  const golden = data.text[`golden_${what}`](row);
  if (mine === golden || !golden) return mine;
  return mine ? `${mine} / ${golden}` : golden;
}
