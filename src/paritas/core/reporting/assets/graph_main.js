// Puts the parts of a graph's page together.

const LOSSES = ["whole", "split", "gap", "seconds"];

async function start() {
  const { operators } = await unpack(document.getElementById("data"));
  makeThemes(() => {});
  if (!operators.length) {
    for (const id of ["rows", "selected"]) document.getElementById(id).hidden = true;
    page.dataset.state ??= "ready";
    return;
  }
  for (const one of operators) {
    for (const option of one.options) for (const name of LOSSES) option[name] = spelled(option[name]);
  }
  let table = null;
  const filters = makeOperatorFilters(operators, () => table.apply());
  const shows = operatorTest(operators, filters.chosen);
  table = makeOperatorTable(operators, () => operators.map(shows), (row) => showOperator(operators[row]));
  await table.built;
  table.apply();
  table.go(table.first);
  for (const button of document.querySelectorAll("[data-row]")) {
    button.addEventListener("click", () => {
      filters.clear();
      table.go(Number(button.dataset.row), { scroll: true });
      document.getElementById("selected").scrollIntoView();
      document.getElementById("selected").focus({ preventScroll: true });
    });
  }
  page.dataset.state ??= "ready";
}

page.classList.add("scripted");
start().catch((error) => broken(error.message));
