// Columns of Tabulator: cells that are text and never HTML, and sorting that knows of NaN.

// By its look: `text`, `run` (a number that many rows share), or a figure, `figure` or `exponential`.
function tableColumn({ key, title = key, look = "text", width, meaning }) {
  const column = { title, field: key, width, formatter: textCell, sorter: byText };
  if (look === "run") return { ...column, hozAlign: "right", sorter: byNumber };
  if (look === "text" || look === "name") return meaning ? { ...column, headerTooltip: meaning } : column;
  const write = look === "figure" ? figure : exponential;
  return { title, field: key, width, hozAlign: "right", headerHozAlign: "right", cssClass: "num", formatter: (cell) => document.createTextNode(write(cell.getValue())), sorter: byNumber, headerSortStartingDir: "desc", headerTooltip: meaning };
}

function textCell(cell) {
  return document.createTextNode(String(cell.getValue() ?? ""));
}

// A figure that is missing comes last either way; NaN is worse than anything.
function byNumber(a, b, _, __, ___, direction) {
  const [left, right] = [a, b].map((value) => (value === null || value === "joined" || value === "" ? null : Number(value)));
  if (left === null || right === null) {
    if (left === right) return 0;
    return (left === null) === (direction === "asc") ? 1 : -1;
  }
  if (Number.isNaN(left) || Number.isNaN(right)) return Number.isNaN(left) - Number.isNaN(right);
  return left < right ? -1 : left > right ? 1 : 0;
}

// `layers.10` behind `layers.2`.
const collator = new Intl.Collator("en", { numeric: true });

function byText(a, b) {
  return collator.compare(a, b);
}

function sortMark(_, direction) {
  return direction === "asc" ? "▲" : direction === "desc" ? "▼" : "<span class='faint'>↕</span>";
}

function sortByKey(event) {
  if (event.key !== "Enter" && event.key !== " ") return;
  const header = event.target.closest(".tabulator-col");
  if (header) { event.preventDefault(); header.querySelector(".tabulator-col-content").click(); }
}
