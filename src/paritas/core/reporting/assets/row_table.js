// The table of a comparison, and its filters: both go over the columns of the data.

function makeRowTable(data, shown, select) {
  const { text, numbers } = data;
  // Tabulator asks each row for its fields: these answer from the columns.
  class Line { constructor(row) { this.row = row; } }
  const field = (name, get) => Object.defineProperty(Line.prototype, name, { get() { return get(this.row); }, set() {}, enumerable: true }); // it writes back what it read
  field("status", (row) => data.status[row]);
  for (const { key } of data.table) field(key, numbers[key] ? (row) => numbers[key][row] : text[key]);

  const columns = [
    { title: "status", field: "status", width: 122, formatter: (cell) => badge(data.statuses[cell.getValue()]), sorter: "number", headerSortStartingDir: "desc", frozen: true },
    ...data.table.map((column) => (column.look === "name" ? { ...tableColumn(column), minWidth: 160, formatter: nameCell(data) } : tableColumn(column))),
  ];
  const lines = Array.from({ length: data.count }, (_, row) => new Line(row));
  return makeTable(lines, columns, { height: { height: "100%" }, placeholder: "No row matches the filters.", shown, select });
}

// Without what is the same for all: the forward phase, and the graph where there is but one.
function nameCell(data) {
  const graphs = data.columns.graph.texts.filter(Boolean);
  const only = graphs.length === 1 ? `${graphs[0]}/` : "";
  return (cell) => {
    const [phase, core, place] = nameParts(cell.getValue());
    const faint = (words) => make("span", { class: "faint" }, words);
    const short = only && core.startsWith(only) ? core.slice(only.length) : core;
    // Too long a name loses its front, where names are alike.
    return make("span", { class: "tail" }, make("bdi", { dir: "ltr" }, phase === "forward/" ? "" : faint(phase), short, faint(place)));
  };
}

function makeRowFilters(data, changed) {
  fill(document.getElementById("step"), unique(data.numbers.step.map(String)));
  fill(document.getElementById("rank"), data.columns.rank.texts);
  fill(document.getElementById("phase"), data.columns.phase.texts);
  const inputs = ["words", "step", "rank", "phase"];
  const filters = makeFilters({ inputs, checks: ["failing", "outputs"], buttons: ".statuses [data-status]", others: { module: null } }, () => {
    const shown = document.getElementById("module-chosen");
    shown.hidden = filters.chosen.module === null;
    shown.firstElementChild.textContent = `module ${filters.chosen.module || "(none)"}`;
    changed();
  });
  document.getElementById("module-chosen").querySelector("button").addEventListener("click", () => filters.set({ module: null }));
  return filters;
}

const SEARCHED = ["name", "op", "module", "line", "code", "kernel", "nodes", "reason", "diagnosis", "judged_by", "my_id", "my_path", "golden_path"];

// Flags of all rows. Each different text is looked at once, however many rows have it.
function matchingRows(data, chosen) {
  const flags = new Uint8Array(data.count).fill(1);
  const keep = (test) => { for (let row = 0; row < data.count; row++) if (flags[row] && !test(row)) flags[row] = 0; };
  if (chosen.pressed.size) keep((row) => chosen.pressed.has(String(data.status[row])));
  if (chosen.failing) keep((row) => data.failing[data.status[row]]);
  if (chosen.outputs) keep((row) => data.text.side(row) === "output");
  if (chosen.step !== "") keep((row) => data.numbers.step[row] === Number(chosen.step));
  if (chosen.rank !== "") keep((row) => data.text.rank(row) === chosen.rank);
  if (chosen.phase !== "") keep((row) => data.text.phase(row) === chosen.phase);
  if (chosen.module !== null) keep(having(data, "module", (path) => isWithin(path, chosen.module)));
  for (const word of chosen.words.toLowerCase().split(/\s+/).filter(Boolean)) {
    const found = SEARCHED.map((name) => having(data, name, (text) => text.toLowerCase().includes(word)));
    keep((row) => found.some((test) => test(row)));
  }
  return flags;
}

function having(data, name, test) {
  const { texts, rows } = data.columns[name];
  const passes = texts.map(test);
  return rows ? (row) => passes[rows[row]] : () => passes[0];
}

function isWithin(path, module) {
  return path === module || (module !== "" && path.startsWith(`${module}.`));
}
