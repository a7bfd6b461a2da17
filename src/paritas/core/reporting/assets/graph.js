// The calls around the first divergence. dagre says where they go; the drawing is ours.

const GRAPH_SIZES = [20, 40, 80, 150];

function makeGraph(data, table) {
  const host = document.getElementById("graph");
  const words = document.getElementById("around-words");
  const graph = data.graph;
  if (!graph) {
    document.getElementById("around").hidden = true;
    document.querySelector("nav [href='#around']").hidden = true;
    return;
  }
  const sizes = GRAPH_SIZES.filter((size, place) => place === 0 || GRAPH_SIZES[place - 1] < graph.nodes.length);
  const select = make("select", {}, ...sizes.map((size) => make("option", { value: size }, Math.min(size, graph.nodes.length))));
  if (sizes.length > 1) select.value = sizes[1];
  const how = graph.flows ? "Arrows show the data flow." : "The data flow of this call is unknown: calls are shown in program order.";
  words.append(`${how} Nearest calls of its step and rank: `, make("label", {}, select), ` of ${graph.calls.toLocaleString("en")}. The thick frame is the divergence; a dashed one is a call with a status that passes.`);
  select.addEventListener("change", () => draw(Number(select.value)));

  function draw(most) {
    const nodes = graph.nodes.slice(0, most);
    const layout = new dagre.graphlib.Graph();
    layout.setGraph({ rankdir: "TB", nodesep: 18, ranksep: 30, marginx: 12, marginy: 12 });
    layout.setDefaultEdgeLabel(() => ({}));
    const labels = nodes.map((node) => [shortOp(node), shortPath(node.label, 34)]);
    nodes.forEach((_, place) => layout.setNode(String(place), { width: Math.max(...labels[place].map((line) => line.length)) * 6.7 + 34, height: 40 }));
    for (const [from, to] of graph.edges) if (from < nodes.length && to < nodes.length) layout.setEdge(String(from), String(to));
    dagre.layout(layout);
    const { width, height } = layout.graph();
    const svg = makeSvg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "calls around the first divergence" });
    svg.append(makeSvg("defs", {}, makeSvg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, makeSvg("path", { d: "M0 0L8 4L0 8z", class: "arrow" }))));
    for (const edge of layout.edges()) svg.append(makeSvg("path", { d: curve(layout.edge(edge).points), class: graph.flows ? "edge" : "edge guess", "marker-end": "url(#arrow)" }));
    nodes.forEach((node, place) => svg.append(box(node, labels[place], layout.node(String(place)), place === 0)));
    host.replaceChildren(svg);
    const centre = layout.node("0");
    host.scrollTo(centre.x - host.clientWidth / 2, centre.y - host.clientHeight / 2);
  }

  function box(node, [first, second], at, isCentre) {
    const status = data.statuses[node.status];
    const passes = data.failing[node.status] ? "" : " passes";
    const group = makeSvg("g", { class: `node s-${status}${isCentre ? " centre" : ""}${passes}`, transform: `translate(${at.x - at.width / 2} ${at.y - at.height / 2})`, tabindex: 0, role: "button", "aria-label": `${node.op} ${node.label}: ${status}` });
    const title = makeSvg("title");
    title.textContent = `${status}: ${node.op}\n${node.label}${node.made === "here" ? "\nmade here" : ""}`;
    const line = (text, y, name, x = 26) => { const found = makeSvg("text", { x, y, class: name }); found.textContent = text; return found; };
    group.append(title, makeSvg("rect", { width: at.width, height: at.height, rx: 4 }), line(SIGNS[status], 25, "sign", 10), line(first, 17, "first"), line(second, 32, "second"));
    const go = () => { table.go(node.row, { scroll: true }); document.getElementById("tensor").scrollIntoView({ block: "nearest" }); };
    group.addEventListener("click", go);
    group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); go(); } });
    return group;
  }

  draw(Number(select.value));
}

function shortOp(node) {
  const name = shortPath(node.op.replace(/^aten\./, "").replace(/\.default$/, "") || "call", 34);
  return node.fused ? `${name} (${node.fused} fused)` : name;
}

function curve(points) {
  const [start, ...rest] = points;
  let path = `M${start.x} ${start.y}`;
  for (let place = 0; place < rest.length - 1; place++) {
    const [here, next] = [rest[place], rest[place + 1]];
    path += `Q${here.x} ${here.y} ${(here.x + next.x) / 2} ${(here.y + next.y) / 2}`;
  }
  const end = rest.at(-1);
  return `${path}L${end.x} ${end.y}`;
}
