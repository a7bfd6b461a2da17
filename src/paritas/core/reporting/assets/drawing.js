// Elements made of text that is never read as HTML, and colours as the present theme has them.

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function badge(status) {
  const sign = make("span", { "aria-hidden": "true" }, SIGNS[status]);
  return make("span", { class: `badge s-${status}` }, sign, ` ${status}`);
}

// A canvas knows no style sheet: ask what a variable of it comes to, under the present theme.
function colour(variable) {
  const probe = make("span", { style: `color: var(${variable})`, hidden: true });
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function counted(count, thing) {
  return `${count.toLocaleString("en")} ${thing}${count === 1 ? "" : "s"}`;
}

// The name without what is the same for most: phase and graph before it, side and position behind.
function nameParts(name) {
  const start = name.startsWith("forward/") ? 8 : name.startsWith("backward/") ? 9 : 0;
  const end = name.lastIndexOf("/");
  return end > start ? [name.slice(0, start), name.slice(start, end), name.slice(end)] : ["", name, ""];
}

// The last steps of a dotted path: what is cut is at the front, where names are alike.
function shortPath(path, most) {
  return path.length <= most ? path : `…${path.slice(path.length - most + 1)}`;
}
