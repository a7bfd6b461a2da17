// Which rows are shown: `chosen` has the value of each input, and the words of the pressed buttons.
// One object, changed in place; `changed` tells everybody.

function makeFilters({ inputs, checks = [], buttons, others = {} }, changed) {
  const find = (id) => document.getElementById(id);
  const mark = (button) => button.dataset.status ?? button.dataset.outcome;
  const pairs = (ids, value) => Object.fromEntries(ids.map((id) => [id, value]));
  const blank = { ...pairs(inputs, ""), ...pairs(checks, false), ...others };
  const chosen = { ...blank, pressed: new Set() };
  const toggles = [...document.querySelectorAll(buttons)];

  for (const id of inputs) find(id).addEventListener("input", () => set({ [id]: find(id).value }));
  for (const id of checks) find(id).addEventListener("change", () => set({ [id]: find(id).checked }));
  for (const button of toggles) {
    button.addEventListener("click", () => {
      if (!chosen.pressed.delete(mark(button))) chosen.pressed.add(mark(button));
      set({});
    });
  }
  find("filters").addEventListener("submit", (event) => event.preventDefault());
  find("filters").addEventListener("reset", (event) => {
    event.preventDefault();
    clear();
  });

  function clear() {
    chosen.pressed.clear();
    set(blank);
  }

  function set(changes) {
    Object.assign(chosen, changes);
    for (const id of inputs) if (find(id).value !== chosen[id]) find(id).value = chosen[id];
    for (const id of checks) find(id).checked = chosen[id];
    for (const button of toggles) button.setAttribute("aria-pressed", chosen.pressed.has(mark(button)));
    changed();
  }

  return { chosen, set, clear };
}

function unique(values) {
  return [...new Set(values)];
}

function fill(select, values) {
  select.append(make("option", { value: "" }, values.length > 1 ? "all" : values[0] ?? "–"));
  if (values.length > 1) select.append(...values.map((value) => make("option", { value }, value)));
  select.disabled = values.length < 2;
}
