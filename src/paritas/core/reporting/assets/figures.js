// Signs and figures as every page writes them, and the data that travels inside it.

const SIGNS = { identical: "=", equivalent: "≈", unstable: "~", unverified: "?", degraded: "▼", different: "≠" };

async function unpack(element) {
  const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(plain).json();
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
