// Puts the parts together. A fault anywhere is shown on the page: an empty section must not pass
// for an empty result.

const page = document.documentElement;

function broken(reason) {
  const place = document.getElementById("broken");
  place.hidden = false;
  place.textContent = `Part of this report could not be drawn: ${reason}. The figures are in the CSV and the JSON beside it.`;
  page.dataset.state = "broken";
}
addEventListener("error", (event) => broken(event.message));
addEventListener("unhandledrejection", (event) => broken(event.reason?.message ?? event.reason));

async function start() {
  const data = await unpack(document.getElementById("data"));
  if (!data.count) return empty();
  let table = null;
  const filters = makeFilters(data, () => {
    table.apply();
    markModule(filters.chosen.module);
  });
  table = makeTable(data, filters, (row) => showTensor(data, row));
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

function makeThemes(redraw) {
  const button = document.getElementById("theme");
  const themes = [["", "as the system"], ["light", "light"], ["dark", "dark"]];
  let at = 0;
  const wear = (theme) => { page.style.colorScheme = theme; redraw(); };
  button.addEventListener("click", () => {
    at = (at + 1) % themes.length;
    button.textContent = `theme: ${themes[at][1]}`;
    wear(themes[at][0]);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  // Paper is white, whatever the screen is.
  addEventListener("beforeprint", () => wear("light"));
  addEventListener("afterprint", () => wear(themes[at][0]));
}

page.classList.add("scripted");
start().catch((error) => broken(error.message));
