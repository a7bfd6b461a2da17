// The table of a page: Tabulator draws the lines in view. A line has its `row`, and a field for each
// column; `shown` gives a flag for each row, `select` shows a row elsewhere.

function makeTable(lines, columns, { height, placeholder, shown, select }) {
  const host = document.getElementById("table");
  const table = new Tabulator(host, {
    data: lines, index: "row", ...height, rowHeight: 25, columns, layout: "fitData", headerSortElement: sortMark,
    columnDefaults: { headerSortTristate: true, resizable: "header", tooltip: (_, cell) => cell.getElement().textContent },
    placeholder,
    rowFormatter: (line) => line.getElement().setAttribute("aria-selected", line.getData().row === selected),
  });
  let selected = null;
  let order = [];
  const built = new Promise((done) => table.on("tableBuilt", done)).then(() => {
    host.setAttribute("aria-rowcount", lines.length);
    for (const header of host.querySelectorAll(".tabulator-col")) header.setAttribute("tabindex", 0);
  });
  table.on("rowClick", (_, line) => { go(line.getData().row); });
  table.on("dataSorted", () => { order = []; });
  table.on("dataFiltered", () => { order = []; });

  function apply() {
    const flags = shown();
    table.setFilter((line) => flags[line.row]);
    let count = 0;
    for (const flag of flags) count += Number(flag);
    document.getElementById("shown").textContent = `${count.toLocaleString("en")} of ${lines.length.toLocaleString("en")}`;
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
