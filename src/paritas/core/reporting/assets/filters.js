// Which rows are shown. One object, changed in place; `changed` tells everybody.

function makeFilters(data, changed) {
  const chosen = { words: "", statuses: new Set(), step: "", rank: "", phase: "", failing: false, outputs: false, module: null };
  const find = (id) => document.getElementById(id);
  const inputs = { words: find("words"), step: find("step"), rank: find("rank"), phase: find("phase") };
  const checks = { failing: find("failing"), outputs: find("outputs") };
  const buttons = [...document.querySelectorAll(".statuses [data-status]")];

  fill(inputs.step, unique(data.numbers.step.map(String)));
  fill(inputs.rank, data.columns.rank.texts);
  fill(inputs.phase, data.columns.phase.texts);

  for (const [name, input] of Object.entries(inputs)) {
    input.addEventListener("input", () => set({ [name]: input.value }));
  }
  for (const [name, check] of Object.entries(checks)) {
    check.addEventListener("change", () => set({ [name]: check.checked }));
  }
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const status = Number(button.dataset.status);
      if (!chosen.statuses.delete(status)) chosen.statuses.add(status);
      set({});
    });
  }
  find("filters").addEventListener("submit", (event) => event.preventDefault());
  find("filters").addEventListener("reset", (event) => {
    event.preventDefault();
    chosen.statuses.clear();
    set({ words: "", step: "", rank: "", phase: "", failing: false, outputs: false, module: null });
  });
  find("module-chosen").querySelector("button").addEventListener("click", () => set({ module: null }));

  function set(changes) {
    Object.assign(chosen, changes);
    for (const [name, input] of Object.entries(inputs)) if (input.value !== chosen[name]) input.value = chosen[name];
    for (const [name, check] of Object.entries(checks)) check.checked = chosen[name];
    for (const button of buttons) button.setAttribute("aria-pressed", chosen.statuses.has(Number(button.dataset.status)));
    const shown = find("module-chosen");
    shown.hidden = chosen.module === null;
    shown.firstElementChild.textContent = `module ${chosen.module || "(none)"}`;
    changed();
  }

  return { chosen, set, rows: () => matching(data, chosen) };
}

const SEARCHED = ["name", "op", "module", "line", "code", "kernel", "nodes", "reason", "diagnosis", "judged_by", "my_id", "my_path", "golden_path"];

// Flags of all rows. Each different text is looked at once, however many rows have it.
function matching(data, chosen) {
  const flags = new Uint8Array(data.count).fill(1);
  const keep = (test) => { for (let row = 0; row < data.count; row++) if (flags[row] && !test(row)) flags[row] = 0; };
  if (chosen.statuses.size) keep((row) => chosen.statuses.has(data.status[row]));
  if (chosen.failing) keep((row) => data.failing[data.status[row]]);
  if (chosen.outputs) keep((row) => data.text.side(row) === "output");
  if (chosen.step !== "") keep((row) => data.numbers.step[row] === Number(chosen.step));
  if (chosen.rank !== "") keep((row) => data.text.rank(row) === chosen.rank);
  if (chosen.phase !== "") keep((row) => data.text.phase(row) === chosen.phase);
  if (chosen.module !== null) keep(having(data, "module", (path) => isWithin(path, chosen.module)));
  for (const word of chosen.words.toLowerCase().split(/\s+/).filter(Boolean)) {
    const found = SEARCHED.map((name) => having(data, name, (text) => text.toLowerCase().includes(word)));
    keep((row) => found.some((test) => test(row)));
  }
  return flags;
}

function having(data, name, test) {
  const { texts, rows } = data.columns[name];
  const passes = texts.map(test);
  return rows ? (row) => passes[rows[row]] : () => passes[0];
}

function isWithin(path, module) {
  return path === module || (module !== "" && path.startsWith(`${module}.`));
}

function unique(values) {
  return [...new Set(values)];
}

function fill(select, values) {
  select.append(make("option", { value: "" }, values.length > 1 ? "all" : values[0] ?? "–"));
  if (values.length > 1) select.append(...values.map((value) => make("option", { value }, value)));
  select.disabled = values.length < 2;
}
