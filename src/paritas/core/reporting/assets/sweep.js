// The matrix, narrowed down to what one looks for. A cell is a link to its run, without a script.

document.documentElement.classList.add("scripted");
const search = document.getElementById("search");
const failing = document.getElementById("failing");
const rows = [...document.querySelectorAll(".matrix tbody tr")];

function narrow() {
  const wanted = search.value.trim().toLowerCase();
  let shown = 0;
  for (const row of rows) {
    const name = row.cells[0].textContent.toLowerCase();
    row.hidden = !name.includes(wanted) || (failing.checked && !row.querySelector("[data-fails]"));
    shown += row.hidden ? 0 : 1;
  }
  document.getElementById("shown").textContent = `${shown} of ${rows.length} targets`;
}

search.addEventListener("input", narrow);
failing.addEventListener("change", narrow);
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && location.hash.startsWith("#run-")) location.hash = "#matrix-title";
});
narrow();
