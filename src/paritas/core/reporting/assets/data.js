// The rows, as columns: `text.name(5)` and `numbers.rel_l2[5]` are of row 5. No row is an object.

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

function statusWord(data, row) {
  return data.statuses[data.status[row]];
}
