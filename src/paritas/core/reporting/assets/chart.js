// Own, inherited and whole error along the program. Zero and infinity have a place of their own
// below and above the decades, because a logarithm has none for them.

function makeChart(data, table) {
  const host = document.getElementById("chart");
  const reading = document.getElementById("chart-reading");
  const SERIES = [["inherited", "--inherited"], ["rel_l2", "--total"], ["own", "--own"]];
  const run = { step: document.getElementById("chart-step"), rank: document.getElementById("chart-rank") };
  let plot = null;
  let rows = [];
  fill(run.step, unique(data.numbers.step.map(String)));
  fill(run.rank, data.columns.rank.texts);
  document.getElementById("chart-run").hidden = run.step.disabled && run.rank.disabled;
  // Many runs in one drawing are a thicket: begin with the one that goes wrong first.
  const begin = data.first ?? data.first_non_finite ?? 0;
  if (data.count && inRun(data, String(data.numbers.step[begin]), data.text.rank(begin)).length >= 20) {
    if (!run.step.disabled) run.step.value = data.numbers.step[begin];
    if (!run.rank.disabled) run.rank.value = data.text.rank(begin);
  }
  for (const select of Object.values(run)) select.addEventListener("input", draw);
  let at = null;

  function draw() {
    rows = inRun(data, run.step.value, run.rank.value).filter((row) => SERIES.some(([name]) => data.numbers[name][row] !== null));
    // What a call is given was drawn where it was made; a weight between two results is no progress.
    const made = rows.filter((row) => (data.text.side(row) === "output" && data.text.op(row) !== "placeholder") || row === data.first || row === data.first_non_finite);
    if (made.length) rows = made;
    at = null;
    plot?.destroy();
    plot = null;
    host.replaceChildren();
    if (!rows.length) {
      host.append(make("p", { class: "quiet" }, "No row here has an error to plot."));
      return;
    }
    if (rows.every((row) => SERIES.every(([name]) => !data.numbers[name][row] && !Number.isNaN(data.numbers[name][row])))) {
      host.append(make("p", { class: "quiet" }, `Nothing to plot: all errors of these ${counted(rows.length, "row")} are zero.`));
      return;
    }
    const [floor, ceiling, endless] = bounds(data, SERIES, rows);
    const clamp = (value) => (value === null ? null : Number.isNaN(value) || value > ceiling ? ceiling : Math.max(value, floor));
    const columns = SERIES.map(([name]) => rows.map((row) => clamp(data.numbers[name][row])));
    host.append(legend());
    plot = new uPlot(options(floor, ceiling, endless), [rows.map((_, place) => place), ...columns], host);
    const over = plot.over;
    let pressed = 0;
    over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
    over.addEventListener("click", (event) => { if (at !== null && Math.abs(event.clientX - pressed) < 4) show(); });
  }

  function options(floor, ceiling, endless) {
    const ink = colour("--faint");
    const grid = { stroke: colour("--line"), width: 1 };
    const dots = rows.length > 2000 ? 2 : 5;
    const series = ([, variable], number) => {
      const stroke = colour(variable);
      if (number < 2) return { stroke, width: 1.25, points: { show: false } };
      return { stroke, fill: stroke, paths: () => null, points: { show: true, size: dots, fill: stroke, width: 0 } };
    };
    return {
      width: host.clientWidth,
      height: 260,
      legend: { show: false },
      cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: (_, low, high) => [low - 0.5, high + 0.5] }, y: { distr: 3, range: [floor, ceiling] } },
      axes: [
        { stroke: ink, grid: { show: false }, ticks: grid, values: (_, places) => places.map((place) => (Number.isInteger(place) && rows[place] !== undefined ? rows[place].toLocaleString("en") : "")), size: 32 },
        { stroke: ink, grid, ticks: grid, size: 62, filter: (_, splits) => splits, splits: () => decades(floor, ceiling), values: (_, splits) => splits.map((value) => tick(value, floor, endless ? ceiling : Infinity)) },
      ],
      series: [{}, ...SERIES.map(series)],
      hooks: { draw: [marks], setCursor: [(u) => { if (u.cursor.idx !== at) { at = u.cursor.idx ?? null; read(); } }] },
    };
  }

  // Status of every row as a strip on top; the first divergence as a labelled line.
  function marks(u) {
    const { left, top, width, height } = u.bbox;
    const context = u.ctx;
    const strip = 6 * devicePixelRatio;
    context.save();
    context.beginPath();
    context.rect(left, top, width, height);
    context.clip();
    const shades = data.statuses.map((status) => colour(`--${status}`));
    const step = Math.max(1, u.valToPos(1, "x", true) - u.valToPos(0, "x", true));
    for (let status = 0; status < shades.length; status++) { // the gravest last, on top
      context.fillStyle = shades[status];
      rows.forEach((row, place) => {
        if (data.status[row] === status) context.fillRect(u.valToPos(place, "x", true) - step / 2, top, step, strip);
      });
    }
    const named = [[data.first, "first divergence", 0]];
    if (data.first_non_finite !== data.first) named.push([data.first_non_finite, "first NaN/Inf", 1]);
    context.font = `600 ${12 * devicePixelRatio}px system-ui, sans-serif`;
    for (const [row, label, depth] of named) {
      const place = row === null ? -1 : rows.indexOf(row);
      if (place < 0) continue;
      const x = u.valToPos(place, "x", true);
      const toLeft = x > left + width / 2;
      context.strokeStyle = context.fillStyle = colour("--different");
      context.lineWidth = 1.5 * devicePixelRatio;
      context.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
      context.beginPath();
      context.moveTo(x, top);
      context.lineTo(x, top + height);
      context.stroke();
      context.textAlign = toLeft ? "right" : "left";
      const at = [x + (toLeft ? -6 : 6) * devicePixelRatio, top + (22 + 16 * depth) * devicePixelRatio];
      context.setLineDash([]);
      context.lineWidth = 4 * devicePixelRatio;
      context.strokeStyle = colour("--paper"); // so that it is read on top of a line
      context.strokeText(label, ...at);
      context.fillText(label, ...at);
    }
    context.restore();
  }

  function read() {
    if (at === null) { reading.textContent = ""; return; }
    const row = rows[at];
    const value = (name) => figure(data.numbers[name][row]) || "not known";
    const words = ` own ${value("own")}, inherited ${value("inherited")}, total ${value("rel_l2")}`;
    const run = data.columns.rank.rows || data.numbers.step.some((step) => step !== data.numbers.step[0]) ? ` step ${data.numbers.step[row]}, rank ${data.text.rank(row)};` : "";
    reading.replaceChildren(badge(statusWord(data, row)), " ", make("b", {}, data.text.name(row)), `${run}${words}`);
  }

  function show() {
    table.go(rows[at], { scroll: true });
    document.getElementById("tensor").scrollIntoView({ block: "nearest" });
  }

  host.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, PageDown: 25, PageUp: -25, Home: -Infinity, End: Infinity };
    if (!plot || (event.key === "Enter" && at === null)) return;
    if (event.key === "Enter") return show();
    if (!(event.key in moves)) return;
    event.preventDefault();
    const from = at ?? Math.max(0, rows.indexOf(data.first)) - moves[event.key];
    at = Math.max(0, Math.min(rows.length - 1, from + moves[event.key]));
    const place = at;
    plot.setCursor({ left: plot.valToPos(place, "x"), top: 10 });
    at = place;
    read();
  });
  new ResizeObserver(() => { if (plot && host.clientWidth) plot.setSize({ width: host.clientWidth, height: 260 }); }).observe(host);
  return { draw };
}

function inRun(data, step, rank) {
  const found = [];
  for (let row = 0; row < data.count; row++) {
    if ((step === "" || data.numbers.step[row] === Number(step)) && (rank === "" || data.text.rank(row) === rank)) found.push(row);
  }
  return found;
}

function legend() {
  const item = (name, words) => make("span", {}, make("i", { class: `swatch ${name}`, "aria-hidden": "true" }), words);
  return make("p", { class: "legend" }, item("own", "own: added by this call"), item("inherited", "inherited: came in with the inputs"), item("total", "total (relative L2)"));
}

// The decades that hold all figures, with one more below for zero and one above for infinity.
function bounds(data, series, rows) {
  let [low, high, endless] = [Infinity, 0, false];
  for (const [name] of series) {
    const column = data.numbers[name];
    for (const row of rows) {
      const value = column[row];
      if (value === null) continue;
      if (!Number.isFinite(value)) endless = true;
      else if (value > 0) { low = Math.min(low, value); high = Math.max(high, value); }
    }
  }
  if (!high) [low, high] = [1e-8, 1]; // infinite ones alone
  low = Math.max(low, high * 1e-18);
  return [10 ** (Math.floor(Math.log10(low)) - 1), 10 ** (Math.floor(Math.log10(high)) + (endless ? 2 : 1)), endless];
}

function decades(floor, ceiling) {
  const [low, high] = [floor, ceiling].map((value) => Math.round(Math.log10(value)));
  const step = Math.ceil((high - low) / 8);
  const found = [];
  for (let exponent = low; exponent <= high; exponent++) if (exponent === low || exponent === high || (exponent - low - 1) % step === 0) found.push(10 ** exponent);
  return found;
}

function tick(value, floor, ceiling) {
  if (value <= floor * 1.01) return "0";
  return value >= ceiling * 0.99 ? "inf, NaN" : value.toExponential(0).replace("+", "");
}
