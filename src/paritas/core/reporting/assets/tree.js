// Modules as a tree: each with its gravest status and how many of its rows fail.

function makeTree(data, filters) {
  const host = document.getElementById("tree");
  const root = grown(data);
  if (root.children.size === 0) {
    host.hidden = true; // no module is known: the table has the room
    return;
  }
  const list = make("ul", {});
  list.append(...[...root.children.values()].map((node) => item(data, filters, node, 0)));
  host.append(make("h3", {}, "Modules"), list);
  const first = data.first === null ? "" : data.text.module(data.first);
  open(host, first);
  host.addEventListener("keydown", (event) => walk(event, host));
}

function grown(data) {
  const root = { name: "", path: "", children: new Map(), counts: data.statuses.map(() => 0), rows: 0 };
  for (let row = 0; row < data.count; row++) {
    const module = data.text.module(row);
    const names = module === "" ? ["(no module)"] : module.split(".");
    let node = root;
    let path = "";
    for (const name of names) {
      path = module === "" ? "" : path ? `${path}.${name}` : name;
      if (!node.children.has(name)) node.children.set(name, { name, path, children: new Map(), counts: data.statuses.map(() => 0), rows: 0 });
      node = node.children.get(name);
      node.counts[data.status[row]] += 1;
    }
    node.rows += 1;
  }
  if (root.children.size === 1 && root.children.has("(no module)")) root.children.clear();
  for (const node of root.children.values()) joined(node);
  return root;
}

// A module that holds nothing but one other is written with it: `model.decoder.layers`.
function joined(node) {
  while (node.children.size === 1 && node.rows === 0) {
    const [only] = node.children.values();
    node.name = `${node.name}.${only.name}`;
    node.path = only.path;
    node.children = only.children;
    node.rows = only.rows;
  }
  for (const child of node.children.values()) joined(child);
}

function item(data, filters, node, depth) {
  const worst = data.statuses[node.counts.findLastIndex((count) => count > 0)];
  const all = node.counts.reduce((sum, count) => sum + count, 0);
  const failing = node.counts.reduce((sum, count, status) => sum + (data.failing[status] ? count : 0), 0);
  const said = node.counts.map((count, status) => (count ? `${count} ${data.statuses[status]}` : "")).filter(Boolean).join(", ");
  const twist = node.children.size ? make("button", { type: "button", class: "twist", "aria-expanded": "false", "aria-label": `open ${node.name}` }, "▸") : make("span", { class: "twist" });
  const label = make("button", { type: "button", class: "module", "data-path": node.path, title: `${node.path}: ${said}`, "aria-label": `${node.name}: ${said}; show its rows` },
    make("span", { class: `mark s-${worst}` }, SIGNS[worst]), make("span", { class: "label tail" }, make("bdi", { dir: "ltr" }, node.name)), make("span", { class: "tally" }, failing ? `${failing}/${all}` : `${all}`));
  const line = make("li", {}, make("div", { class: "line" }, twist, label));
  line.style.setProperty("--depth", depth);
  if (node.children.size) {
    twist.addEventListener("click", () => turn(twist.getAttribute("aria-expanded") !== "true"));
    line.turn = turn;
  }
  label.addEventListener("click", () => filters.set({ module: filters.chosen.module === node.path ? null : node.path }));

  function turn(isOpen) {
    twist.setAttribute("aria-expanded", isOpen);
    twist.textContent = isOpen ? "▾" : "▸";
    line.querySelector(":scope > ul")?.remove();
    // Children are made when they are looked at: a model may have tens of thousands.
    if (isOpen) line.append(make("ul", {}, ...[...node.children.values()].map((child) => item(data, filters, child, depth + 1))));
  }
  return line;
}

// The way to a module, opened; without one, what stands alone on top.
function open(host, module) {
  for (let round = 0; round < 64; round++) {
    const closed = [...host.querySelectorAll("li")].find((line) => {
      const twist = line.querySelector(":scope > .line > [aria-expanded=false]");
      const path = line.querySelector(":scope > .line > .module").dataset.path;
      return twist && (isWithin(module, path) || host.querySelectorAll("li").length === 1);
    });
    if (!closed) return;
    closed.turn(true);
  }
}

function markModule(module) {
  for (const label of document.querySelectorAll(".module")) label.setAttribute("aria-pressed", label.dataset.path === module);
}

function walk(event, host) {
  const line = event.target.closest("li");
  if (!line || !["ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight"].includes(event.key)) return;
  event.preventDefault();
  if (event.key === "ArrowLeft" || event.key === "ArrowRight") return line.turn?.(event.key === "ArrowRight");
  const labels = [...host.querySelectorAll(".module")];
  const at = labels.indexOf(line.querySelector(".module"));
  labels[at + (event.key === "ArrowDown" ? 1 : -1)]?.focus();
}
