// Puts the parts together.

async function start() {
  const data = decode(await unpack(document.getElementById("data")));
  if (!data.count) return empty();
  let table = null;
  const filters = makeRowFilters(data, () => {
    table.apply();
    markModule(filters.chosen.module);
  });
  table = makeRowTable(data, () => matchingRows(data, filters.chosen), (row) => showTensor(data, row));
  const chart = makeChart(data, table);
  makeTree(data, filters);
  makeGraph(data, table);
  chart.draw();
  await table.built;
  table.apply();
  const first = data.first ?? data.first_non_finite ?? data.status.findIndex((status) => data.failing[status]);
  table.go(Math.max(0, first), { scroll: first > 0 });

  for (const button of document.querySelectorAll("[data-row]")) {
    button.addEventListener("click", () => {
      table.go(Number(button.dataset.row), { scroll: true });
      document.getElementById("rows").scrollIntoView();
    });
  }
  makeThemes(() => { chart.draw(); if (table.selected() !== null) showTensor(data, table.selected()); });
  page.dataset.state ??= "ready";
}

function empty() {
  for (const id of ["along", "rows", "tensor", "around"]) document.getElementById(id).hidden = true;
  document.querySelector("nav").hidden = true;
  makeThemes(() => {});
  page.dataset.state ??= "ready";
}

page.classList.add("scripted");
start().catch((error) => broken(error.message));
