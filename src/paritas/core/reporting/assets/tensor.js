// The selected row: both sides, all figures, and where in the tensor the mismatches lie.

const SIDE_FACTS = [["path", "file"], ["id", "name there"], ["op", "operator"], ["dtype", "dtype"], ["shape", "shape"], ["value", "value"], ["step", "step"], ["ranks", "ranks"], ["made_of", "put together"]];
const SIDE_FIGURES = [["minimum", "min"], ["maximum", "max"], ["mean", "mean"]];
const FIGURES = [
  ["rel_l2", "relative L2"], ["own", "own error"], ["inherited", "inherited error"], ["max_abs", "max abs"], ["mean_abs", "mean abs"], ["rmse", "rms"],
  ["max_rel", "max relative"], ["mean_rel", "mean relative"], ["max_ulp", "max ulp"], ["cosine", "cosine"], ["pcc", "correlation"], ["kl_divergence", "KL divergence"],
  ["numel", "elements"], ["mismatched", "unequal elements"], ["nonfinite_mismatches", "NaN/Inf mismatches"],
];
const NEAR_ONE = new Set(["cosine", "pcc"]);
const COUNTS = [["nan", "NaN"], ["posinf", "+Inf"], ["neginf", "-Inf"], ["zero", "zero"]];

function showTensor(data, row) {
  const { text, numbers } = data;
  const status = statusWord(data, row);
  const words = (name) => text[name](row);
  document.getElementById("tensor-title").replaceChildren("Selected row ", badge(status));
  const facts = [
    ["what was found", words("reason")], ["what kind of wrong", words("diagnosis")], ["what to do", words("advice")], ["aspect", words("aspect") === "value" ? "" : words("aspect")],
    ["judged by", words("judged_by")], ["limits", words("limits")], ["worst / allowed", allowed(data, row)], ["worst slice", words("slice")],
    ["difference", { here: "made here", before: "came in with its inputs" }[words("made")] ?? ""],
    ["matched by", words("matched_by")], ["operator", words("op")], ["module", words("module")],
    ["fused", words("nodes") && `${words("nodes")}${words("kernel") && ` in ${words("kernel")}`}`],
    ["source", words("line"), words("code")],
    ["place", `${words("phase")}, ${words("side")} of a ${words("level")}${words("graph") && ` in ${words("graph")}`}; step ${numbers.step[row]}, rank ${words("rank")}; row ${row.toLocaleString("en")}`],
  ].filter(([, value]) => value);
  const list = make("dl", { class: "facts" }, ...facts.map(([label, value, code]) => make("div", {}, make("dt", {}, label), make("dd", {}, value, code ? make("code", {}, code) : null))));
  const parts = [make("p", { class: "name", "aria-live": "polite" }, text.name(row)), make("div", { class: "panels" }, list, sides(data, row), figures(data, row))];
  const detail = data.details[row];
  if (detail) parts.push(...closer(detail));
  else parts.push(make("p", { class: "quiet" }, status === "identical" ? "Nothing differs, so there is no map of mismatches." : "No details were recorded for this pair."));
  document.getElementById("tensor-body").replaceChildren(...parts);
}

function allowed({ numbers }, row) {
  if (numbers.max_z[row] === null) return "";
  const ratio = (what) => `${figure(numbers[`${what}_z`][row])} / ${figure(numbers[`${what}_limit`][row])}`;
  return `worst element ${ratio("max")}, root mean square ${ratio("rms")}, in multiples of the noise`;
}

function sides({ text, numbers }, row) {
  const there = (which) => text[`${which}_there`](row);
  const lines = SIDE_FACTS.map(([name, label]) => [label, ...["my", "golden"].map((which) => text[`${which}_${name}`](row)), ""]);
  lines.push(...SIDE_FIGURES.map(([name, label]) => [label, ...["my", "golden"].map((which) => figure(numbers[`${which}_${name}`][row])), "num"]));
  lines.push(...COUNTS.map(([name, label]) => [label, ...["candidate", "reference"].map((which) => figure(numbers[`${name}_${which}`][row])), "num"]).filter(([, mine, golden]) => `${mine}${golden}`.replaceAll("0", "")));
  const head = make("tr", {}, make("td"), make("th", { scope: "col" }, there("my") ? "mine" : "mine: missing"), make("th", { scope: "col" }, there("golden") ? "golden" : "golden: missing"));
  const body = lines.filter(([, mine, golden]) => mine || golden).map(([label, mine, golden, kind]) =>
    make("tr", { class: mine !== golden && mine && golden && kind === "" && !["file", "name there"].includes(label) ? "unlike" : null }, make("th", { scope: "row" }, label), make("td", { class: kind }, mine || "–"), make("td", { class: kind }, golden || "–")));
  return make("table", { class: "sides" }, make("thead", {}, head), make("tbody", {}, ...body));
}

function figures({ numbers }, row) {
  const known = FIGURES.filter(([name]) => numbers[name][row] !== null);
  if (!known.length) return make("p", { class: "quiet" }, "No metrics were computed for this pair.");
  return make("table", { class: "figures" }, make("tbody", {}, ...known.map(([name, label]) => make("tr", {}, make("th", { scope: "row" }, label), make("td", { class: "num" }, NEAR_ONE.has(name) ? exact(numbers[name][row], 10) : figure(numbers[name][row]))))));
}

function closer(detail) {
  const parts = [];
  if (detail.heat) parts.push(figureOf("Where the mismatches are", heatMap(detail.heat), detail.region));
  if (detail.ulps?.length) parts.push(figureOf("How far apart, in ulps", histogram(detail.ulps)));
  if (detail.worst?.length) parts.push(figureOf("Worst elements", worstTable(detail.worst)));
  return [make("div", { class: "panels closer" }, ...parts)];
}

function figureOf(title, content, region) {
  const box = region?.length ? make("p", { class: "quiet" }, `all in [${region.map(([begin, end]) => `${begin}:${end}`).join(", ")}]`) : null;
  return make("figure", {}, make("figcaption", {}, title), ...content, box);
}

// Darker is farther off; a cell without a mismatch is empty, so that a small one is still seen.
function heatMap({ axes, extents, cells, counts }) {
  const [down, across] = [cells.length, cells[0]?.length ?? 0];
  const edge = Math.max(3, Math.min(24, Math.floor(Math.min(448 / across, 320 / down))));
  const [width, height] = [across * edge, down * edge];
  const canvas = make("canvas", { width: width * 2, height: height * 2, role: "img", "aria-label": `map of mismatches, ${down} by ${across} cells` });
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(2, 2);
  context.fillStyle = colour("--different");
  cells.forEach((line, y) => line.forEach((value, x) => {
    if (!counts[y][x]) return;
    const share = Number(spelled(value));
    context.globalAlpha = Number.isFinite(share) ? 0.12 + 0.88 * Math.min(1, share) : 1;
    context.fillRect(x * edge, y * edge, edge - (edge > 5 ? 1 : 0), edge - (edge > 5 ? 1 : 0));
  }));
  const [first, second] = axes.length > 1 ? extents : [null, extents[0]];
  const span = (place, many, extent) => { const [begin, end] = [Math.floor(place * extent / many), Math.ceil((place + 1) * extent / many)]; return end - begin > 1 ? `${begin}–${end - 1}` : `${begin}`; };
  const reading = make("p", { class: "reading", "aria-live": "polite" }, "point at a cell to read its value");
  canvas.addEventListener("mousemove", (event) => {
    const [x, y] = [Math.floor(event.offsetX / edge), Math.floor(event.offsetY / edge)];
    if (counts[y]?.[x] === undefined) return;
    const place = axes.length > 1 ? `axis ${axes[0]}: ${span(y, down, first)}, axis ${axes[1]}: ${span(x, across, second)}` : `axis ${axes[0]}: ${span(x, across, second)}`;
    reading.textContent = `${place}: ${counts[y][x] ? `${counted(counts[y][x], "mismatch").replace(/hs$/, "hes")}, up to ${figure(spelled(cells[y][x]))} of the largest` : "none"}`;
  });
  const label = (axis, extent) => `axis ${axis}, 0 to ${extent - 1}`;
  const grid = make("div", { class: "heat" }, axes.length > 1 ? make("span", { class: "down" }, label(axes[0], first)) : make("span"), canvas, make("span"), make("span", { class: "across" }, label(axes.at(-1), second)));
  const scale = make("p", { class: "legend" }, make("span", {}, make("i", { class: "ramp", "aria-hidden": "true" }), "largest difference in the cell: none to the largest of all"));
  return [grid, scale, reading];
}

function histogram(ulps) {
  const most = Math.max(...ulps.map(([, count]) => Math.log10(count + 1)));
  const name = (k) => (k < 0 ? "equal" : k === 0 ? "1" : k < 14 ? `${2 ** k}–${2 ** (k + 1) - 1}` : `2^${k} and up`);
  const lines = ulps.map(([k, count]) => {
    const bar = make("span", { class: k < 0 ? "bar equal" : "bar" });
    bar.style.width = `${Math.max(0.5, (100 * Math.log10(count + 1)) / most)}%`;
    return make("tr", {}, make("th", { scope: "row" }, name(k)), make("td", { class: "track" }, bar), make("td", { class: "num" }, count.toLocaleString("en")));
  });
  return [make("table", { class: "histogram" }, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "ulps"), make("td"), make("th", { scope: "col", class: "num" }, "elements"))), make("tbody", {}, ...lines)), make("p", { class: "quiet" }, "bars: log scale")];
}

function worstTable(worst) {
  const head = ["index", "mine", "golden", "difference", "ulps"].map((name) => make("th", { scope: "col", class: name === "index" ? null : "num" }, name));
  const lines = worst.map(({ index, my, golden, ulps }) => {
    const [mine, right] = [spelled(my), spelled(golden)];
    const cells = [mine, right, mine - right, ulps === null || ulps === undefined ? null : spelled(ulps)];
    return make("tr", {}, make("th", { scope: "row" }, `[${index.join(", ")}]`), ...cells.map((value, place) => make("td", { class: "num" }, place < 2 ? exact(value) : figure(value))));
  });
  return [make("table", { class: "worst" }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...lines))];
}

// With as many digits as it takes to tell two of them apart.
function exact(value, digits = 9) {
  return Number.isFinite(value) ? String(Number(value.toPrecision(digits))) : figure(value);
}
