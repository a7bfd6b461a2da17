// The table of operators: what needs a person first, then in the order of the graph.

const OUTCOMES = { failed: ["≠", "failed"], unsupported: ["?", "unsupported"], verified: ["✓", "verified"], nothing: ["–", "nothing to check"] };

function outcomeBadge(outcome) {
  const [sign, words] = OUTCOMES[outcome];
  return make("span", { class: `badge o-${outcome}` }, make("span", { "aria-hidden": "true" }, sign), ` ${words}`);
}

function makeOperatorTable(operators, filters, select) {
  const order = Object.keys(OUTCOMES);
  const lines = operators.map((one, row) => ({
    row,
    outcome: order.indexOf(one.outcome),
    node: one.sites[0][0],
    operator: one.operator,
    signature: one.signature,
    calls: one.sites.length,
    right: one.options.filter((option) => option.passes).length,
    splits: one.options.length,
    gap: worstGap(one.options),
    source: one.sites[0][1],
    code: one.sites[0][2],
    module: one.sites[0][3],
    reason: one.reason || one.options.find((option) => !option.passes)?.reason || "",
    seconds: one.seconds,
  }));
  lines.sort((a, b) => a.outcome - b.outcome || a.row - b.row);

  const columns = [
    { title: "outcome", field: "outcome", width: 158, formatter: (cell) => outcomeBadge(order[cell.getValue()]), sorter: "number", frozen: true },
    { title: "node", field: "node", width: 170, formatter: textCell, sorter: byText },
    { title: "operator", field: "operator", width: 220, formatter: textCell, sorter: byText },
    { title: "source", field: "source", width: 160, formatter: textCell, sorter: byText },
    figureColumn("calls", "calls", "number of identical calls in the graph", figure, 74),
    { title: "splits right", field: "right", width: 104, hozAlign: "right", headerHozAlign: "right", cssClass: "num", formatter: rightCell, sorter: "number", headerTooltip: "splits that pass, of those that were compared" },
    figureColumn("loss diff.", "gap", "the largest relative difference of the losses on one device and on several", exponential, 100),
    { title: "signature", field: "signature", width: 250, formatter: textCell, sorter: byText },
    { title: "reason", field: "reason", width: 300, formatter: textCell, sorter: byText },
    { title: "code", field: "code", width: 240, formatter: textCell, sorter: byText },
    { title: "module", field: "module", width: 160, formatter: textCell, sorter: byText },
    figureColumn("seconds", "seconds", "duration of the check", figure, 92),
  ];

  const host = document.getElementById("table");
  const table = new Tabulator(host, {
    data: lines, index: "row", maxHeight: "min(460px, 66vh)", rowHeight: 25, columns, layout: "fitData", headerSortElement: sortMark,
    columnDefaults: { headerSortTristate: true, resizable: "header", tooltip: (_, cell) => cell.getElement().textContent },
    placeholder: "No operator matches the filters.",
    rowFormatter: (line) => line.getElement().setAttribute("aria-selected", line.getData().row === selected),
  });
  let selected = null;
  const built = new Promise((done) => table.on("tableBuilt", done)).then(() => {
    host.setAttribute("aria-rowcount", operators.length);
    host.querySelector(".tabulator-tableholder").setAttribute("tabindex", 0);
    for (const header of host.querySelectorAll(".tabulator-col")) header.setAttribute("tabindex", 0);
  });
  table.on("rowClick", (_, line) => { go(line.getData().row); });

  function apply() {
    table.setFilter((line) => filters.shows(line.row));
    const count = operators.filter((_, row) => filters.shows(row)).length;
    document.getElementById("shown").textContent = `${count.toLocaleString("en")} of ${operators.length.toLocaleString("en")}`;
  }

  function go(row, { scroll = false } = {}) {
    const before = selected;
    selected = row;
    for (const which of [before, row]) {
      const line = which === null ? null : table.getRow(which);
      if (line) line.getElement().setAttribute("aria-selected", which === row);
    }
    if (scroll) table.scrollToRow(row, "center", false).catch(() => {}); // it is filtered out
    select(operators[row]);
  }

  host.addEventListener("keydown", (event) => {
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15, Home: -Infinity, End: Infinity };
    if (event.target.closest(".tabulator-header") || !(event.key in moves)) return;
    event.preventDefault();
    const rows = table.getData("active").map((line) => line.row);
    if (!rows.length) return;
    const place = Math.max(0, Math.min(rows.length - 1, rows.indexOf(selected) + moves[event.key]));
    go(rows[place], { scroll: true });
  });
  host.addEventListener("keydown", sortByKey);

  return { built, apply, go, first: lines[0].row };
}

function rightCell(cell) {
  const { right, splits } = cell.getData();
  return document.createTextNode(splits ? `${right} of ${splits}` : "");
}

// NaN is worse than anything; null where no split has both losses.
function worstGap(options) {
  const gaps = options.map((option) => option.gap).filter((gap) => gap !== null);
  return gaps.length ? Math.max(...gaps) : null;
}
