// The table of operators, and its filters: what needs a person first, then in the order of the graph.

const OUTCOMES = { failed: ["≠", "failed"], unsupported: ["?", "unsupported"], verified: ["✓", "verified"], nothing: ["–", "nothing to check"] };

function outcomeBadge(outcome) {
  const [sign, words] = OUTCOMES[outcome];
  return make("span", { class: `badge o-${outcome}` }, make("span", { "aria-hidden": "true" }, sign), ` ${words}`);
}

function makeOperatorTable(operators, shown, select) {
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
    tableColumn({ key: "node", width: 170 }),
    tableColumn({ key: "operator", width: 220 }),
    tableColumn({ key: "source", width: 160 }),
    tableColumn({ key: "calls", look: "figure", width: 74, meaning: "number of identical calls in the graph" }),
    { title: "splits right", field: "right", width: 104, hozAlign: "right", headerHozAlign: "right", cssClass: "num", formatter: rightCell, sorter: "number", headerTooltip: "splits that pass, of those that were compared" },
    tableColumn({ key: "gap", title: "loss diff.", look: "exponential", width: 100, meaning: "the largest relative difference of the losses on one device and on several" }),
    tableColumn({ key: "signature", width: 250 }),
    tableColumn({ key: "reason", width: 300 }),
    tableColumn({ key: "code", width: 240 }),
    tableColumn({ key: "module", width: 160 }),
    tableColumn({ key: "seconds", look: "figure", width: 92, meaning: "duration of the check" }),
  ];
  const height = { maxHeight: "min(460px, 66vh)" };
  const table = makeTable(lines, columns, { height, placeholder: "No operator matches the filters.", shown, select });
  return { ...table, first: lines[0].row };
}

function makeOperatorFilters(operators, changed) {
  fill(document.getElementById("operator"), unique(operators.map((one) => one.operator)).sort(byText));
  return makeFilters({ inputs: ["words", "operator"], buttons: "[data-outcome]" }, changed);
}

// A test of one row; the texts are put together once.
function operatorTest(operators, chosen) {
  const texts = operators.map(searched);
  return (one, row) => {
    if (chosen.pressed.size && !chosen.pressed.has(one.outcome)) return false;
    if (chosen.operator && chosen.operator !== one.operator) return false;
    return chosen.words.toLowerCase().split(/\s+/).every((word) => texts[row].includes(word));
  };
}

function searched(one) {
  const splits = one.options.flatMap((option) => [option.words, option.rule, option.reason, option.status, option.origin]);
  return [one.operator, one.signature, one.reason, ...one.notes, ...one.sites.flat(), ...splits].join("\n").toLowerCase();
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
