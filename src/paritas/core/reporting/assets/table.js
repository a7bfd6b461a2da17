// The table: Tabulator draws the rows in view; sorting and filtering go over the columns.

function makeTable(data, filters, select) {
  const { text, numbers } = data;
  // Tabulator asks each row for its fields: these answer from the columns.
  class Line { constructor(row) { this.row = row; } }
  const field = (name, get) => Object.defineProperty(Line.prototype, name, { get() { return get(this.row); }, set() {}, enumerable: true }); // it writes back what it read
  field("status", (row) => data.status[row]);
  for (const { key } of data.table) field(key, numbers[key] ? (row) => numbers[key][row] : text[key]);

  const columns = [
    { title: "status", field: "status", width: 122, formatter: (cell) => badge(data.statuses[cell.getValue()]), sorter: "number", headerSortStartingDir: "desc", frozen: true },
    ...data.table.map((column) => tableColumn(data, column)),
  ];

  const host = document.getElementById("table");
  const lines = Array.from({ length: data.count }, (_, row) => new Line(row));
  const table = new Tabulator(host, {
    data: lines, index: "row", height: "100%", rowHeight: 25, columns, layout: "fitData", headerSortElement: sortMark,
    columnDefaults: { headerSortTristate: true, resizable: "header", tooltip: (_, cell) => cell.getElement().textContent },
    placeholder: "No row matches the filters.",
    rowFormatter: (line) => line.getElement().setAttribute("aria-selected", line.getData().row === selected),
  });
  let selected = null;
  let order = [];
  const built = new Promise((done) => table.on("tableBuilt", done)).then(() => {
    host.setAttribute("aria-rowcount", data.count);
    for (const header of host.querySelectorAll(".tabulator-col")) header.setAttribute("tabindex", 0);
  });
  table.on("rowClick", (_, line) => { go(line.getData().row); });
  table.on("dataSorted", () => { order = []; });
  table.on("dataFiltered", () => { order = []; });

  function apply() {
    const flags = filters.rows();
    table.setFilter((line) => flags[line.row]);
    let count = 0;
    for (const flag of flags) count += flag;
    document.getElementById("shown").textContent = `${count.toLocaleString("en")} of ${data.count.toLocaleString("en")}`;
  }

  function go(row, { scroll = false } = {}) {
    const before = selected;
    selected = row;
    for (const which of [before, row]) {
      const line = which === null ? null : table.getRow(which);
      if (line) line.getElement().setAttribute("aria-selected", which === row);
    }
    if (scroll) table.scrollToRow(row, "center", false).catch(() => {}); // it is filtered out
    select(row);
  }

  host.addEventListener("keydown", (event) => {
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15, Home: -Infinity, End: Infinity };
    if (event.target.closest(".tabulator-header") || !(event.key in moves)) return;
    event.preventDefault();
    if (!order.length) order = table.getData("active").map((line) => line.row);
    if (!order.length) return;
    const at = order.indexOf(selected) + moves[event.key];
    const place = Math.max(0, Math.min(order.length - 1, at));
    go(order[place], { scroll: true });
  });
  host.addEventListener("keydown", sortByKey);

  return { built, apply, go, selected: () => selected, count: () => table.getDataCount("active") };
}

// A column as the report describes it.
function tableColumn(data, { key, title, look, width, meaning }) {
  const column = { title, field: key, width, formatter: textCell, sorter: byText };
  if (look === "name") return { ...column, minWidth: 160, formatter: nameCell(data) };
  if (look === "run") return { ...column, hozAlign: "right", sorter: byNumber };
  if (look === "text") return meaning ? { ...column, headerTooltip: meaning } : column;
  return figureColumn(title, key, meaning, look === "figure" ? figure : exponential, width);
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
