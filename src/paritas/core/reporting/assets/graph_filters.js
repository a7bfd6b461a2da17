// Which operators are shown. One object, changed in place; `changed` tells everybody.

function makeOperatorFilters(operators, changed) {
  const chosen = { words: "", operator: "", outcomes: new Set() };
  const find = (id) => document.getElementById(id);
  const inputs = { words: find("words"), operator: find("operator") };
  const buttons = [...document.querySelectorAll("[data-outcome]")];
  const texts = operators.map(searched);

  const names = [...new Set(operators.map((one) => one.operator))].sort(byText);
  inputs.operator.append(make("option", { value: "" }, names.length > 1 ? "all" : names[0] ?? "–"));
  if (names.length > 1) inputs.operator.append(...names.map((value) => make("option", { value }, value)));
  inputs.operator.disabled = names.length < 2;

  for (const [name, input] of Object.entries(inputs)) {
    input.addEventListener("input", () => set({ [name]: input.value }));
  }
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const outcome = button.dataset.outcome;
      if (!chosen.outcomes.delete(outcome)) chosen.outcomes.add(outcome);
      set({});
    });
  }
  find("filters").addEventListener("submit", (event) => event.preventDefault());
  find("filters").addEventListener("reset", (event) => {
    event.preventDefault();
    clear();
  });

  function clear() {
    chosen.outcomes.clear();
    set({ words: "", operator: "" });
  }

  function set(changes) {
    Object.assign(chosen, changes);
    for (const [name, input] of Object.entries(inputs)) if (input.value !== chosen[name]) input.value = chosen[name];
    for (const button of buttons) button.setAttribute("aria-pressed", chosen.outcomes.has(button.dataset.outcome));
    changed();
  }

  function shows(row) {
    const one = operators[row];
    if (chosen.outcomes.size && !chosen.outcomes.has(one.outcome)) return false;
    if (chosen.operator && chosen.operator !== one.operator) return false;
    return chosen.words.toLowerCase().split(/\s+/).every((word) => texts[row].includes(word));
  }

  return { shows, clear };
}

function searched(one) {
  const splits = one.options.flatMap((option) => [option.words, option.rule, option.reason, option.status, option.origin]);
  return [one.operator, one.signature, one.reason, ...one.notes, ...one.sites.flat(), ...splits].join("\n").toLowerCase();
}
