// Everything about one operator: its place, its rules, its splits with losses and findings, its calls.

const MOST_SITES = 500;

function showOperator(one) {
  const [node, source, code, module] = one.sites[0];
  const facts = [
    ["operator", make("code", {}, one.operator)],
    ["called as", make("code", {}, one.signature)],
    ["source", source || "not known", code ? " " : null, code ? make("code", {}, code) : null],
    module ? ["module", module] : null,
    one.reason && one.options.every((option) => option.passes) ? ["reason", one.reason] : null, // else the splits say it
    one.script ? ["by itself", scriptLink(one.script)] : null,
    ...one.rules.map((rule) => [`rule, ${rule.origins.join(", ")}`, drawnRule(rule)]),
    ...one.notes.map((note) => ["note", note]),
  ];
  const rows = facts.filter((fact) => fact !== null).map(([label, ...words]) => make("div", {}, make("dt", {}, label), make("dd", {}, ...words.filter((word) => word !== null))));
  document.getElementById("selected-body").replaceChildren(
    make("p", {}, make("span", { class: "name" }, node), " ", outcomeBadge(one.outcome), one.sites.length > 1 ? make("span", { class: "faint" }, `  ${counted(one.sites.length, "call")}, all alike`) : ""),
    make("dl", { class: "facts" }, ...rows),
    one.options.length ? splitsTable(one.options, one.rules.length > 1) : make("p", { class: "quiet" }, "No split of it was compared."),
    one.sites.length > 1 ? sitesList(one.sites) : "",
  );
}

// A script beside this page; a name that could lead elsewhere stays text.
function scriptLink(name) {
  const code = make("code", {}, name);
  return /^(\w[\w.-]*\/)*\w[\w.-]*$/.test(name) ? make("a", { href: name }, code) : code;
}

function drawnRule(rule) {
  const tokens = [...rule.tokens, ...rule.loose.flatMap((token) => [[" ", "text", "", ""], token])];
  return make("span", { class: "rule" }, ...tokens.map(([text, kind, status, hint]) => {
    if (kind === "text") return text;
    const wrong = status && !["identical", "equivalent"].includes(status);
    const mark = wrong ? make("span", { class: "mark", "aria-label": status }, SIGNS[status]) : "";
    return make("span", { class: `dim ${kind}${status ? ` s-${status}` : ""}`, title: hint }, text, mark);
  }));
}

// Where there are several rules, each split says which is its own.
function splitsTable(options, several) {
  const names = [["split"], ["ranks"], ["status"], ["loss, one device", "num"], ["loss, several", "num"], ["rel. difference", "num"], ["gradients"], ["seconds", "num"]];
  const body = options.flatMap((option) => {
    const ranks = option.confirmation ? `${option.ranks}: ${option.confirmation}` : option.ranks;
    const cells = [option.words, ranks, badge(option.status), loss(option.whole), loss(option.split), exponential(option.gap), option.gradients, figure(option.seconds)];
    const row = make("tr", {}, ...cells.map((cell, place) => make("td", { class: names[place][1] }, cell)));
    return [row, make("tr", { class: "why" }, make("td", { colspan: names.length }, findingsOf(option, several)))];
  });
  const head = make("tr", {}, ...names.map(([name, kind]) => make("th", { scope: "col", class: kind }, name)));
  return make("div", { class: "scroll" }, make("table", { class: "splits" }, make("thead", {}, head), make("tbody", {}, ...body)));
}

// A loss is compared with its neighbour: more digits than elsewhere.
function loss(value) {
  if (value === null || !Number.isFinite(value)) return figure(value);
  return String(Number(value.toPrecision(9)));
}

function findingsOf(option, several) {
  const words = [several ? `${option.origin} rule ${option.rule}` : "", option.reason, option.proof, counted(option.findings.length, "finding")];
  const names = ["status", "item", "value", "off by", "worst / allowed"];
  const rows = option.findings.flatMap((finding) => {
    const cells = [badge(finding.status), finding.item, finding.value, finding.off_by, finding.worst];
    const told = finding.words.length ? make("tr", {}, make("td", { class: "words", colspan: names.length }, finding.words.join("; "))) : null;
    return [make("tr", {}, ...cells.map((cell) => make("td", {}, cell))), told].filter(Boolean);
  });
  const table = make("table", { class: "findings" },
    make("thead", {}, make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}, ...rows));
  const left = option.not_compared.map((words) => make("p", {}, `not compared: ${words}`));
  return make("details", { open: !option.passes }, make("summary", {}, words.filter(Boolean).join("; ")), rows.length ? table : "", ...left);
}

function sitesList(sites) {
  const names = ["node", "source", "code", "module"];
  const rows = sites.slice(0, MOST_SITES).map((site) => make("tr", {}, ...site.map((text, place) => make("td", {}, place === 2 && text ? make("code", {}, text) : text))));
  const more = sites.length - rows.length;
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}, ...rows));
  const words = make("summary", {}, "All its calls ", make("span", { class: "count" }, sites.length.toLocaleString("en")));
  return make("details", { class: "listed" }, words, make("div", { class: "sites", tabindex: 0 }, table), more > 0 ? make("p", {}, `and ${more} more: they are in the JSON`) : "");
}
