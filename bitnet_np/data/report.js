"use strict";
// Shows the tensor that is chosen on the heat map. Text of files is only ever set as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const panel = document.getElementById("panel");
const buttons = [...document.querySelectorAll("button[data-id]")];

function make(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "line", "path", "rect", "circle", "text", "title"].includes(name);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function short(x) {
  if (x === 0 || (Math.abs(x) >= 1e-3 && Math.abs(x) < 1e5)) return String(Number(x.toPrecision(6)));
  return x.toExponential(4).replace("e+", "e");
}
function brief(x) {
  return x === 0 || (Math.abs(x) >= 0.01 && Math.abs(x) < 1e4) ? String(Number(x.toPrecision(3))) : x.toExponential(1).replace("e+", "e");
}

function table(header, rows, numeric) {
  const cells = (row, kind) => make("tr", {}, ...row.map((text, i) => make(text ? kind : "td", { class: numeric(i) ? "number mono" : "" }, text)));
  return make("div", { class: "scroll", tabindex: "0" },
    make("table", { class: "plain" }, make("thead", {}, cells(header, "th")), make("tbody", {}, ...rows.map((row) => cells(row, "td")))));
}

// The frame of the chart: 220 high, and on a phone not as wide, so that its letters stay large.
const HIGHEST = 10; // decimal logarithm: a larger error, in units of the limit, says that the limit is nearly 0
const LEFT = 52, RIGHT = matchMedia("(max-width: 600px)").matches ? 328 : 548, TOP = 14, BOTTOM = 178;
function chart(title, across, ...inside) {
  return make("svg", { viewBox: `0 0 ${RIGHT + 12} 220`, role: "img", "aria-label": title },
    make("line", { class: "axis", x1: LEFT, x2: RIGHT, y1: BOTTOM, y2: BOTTOM }), make("line", { class: "axis", x1: LEFT, x2: LEFT, y1: TOP, y2: BOTTOM }),
    ...inside, make("text", { x: (LEFT + RIGHT) / 2, y: 214, "text-anchor": "middle" }, across));
}
function power(n) {
  return n >= -2 && n <= 2 ? String(Number((10 ** n).toPrecision(1))) : `1e${n}`;
}

function byPosition(detail) {
  const least = Math.min(0.1, ...detail.errors.filter((x) => x > 0));
  const logs = detail.errors.map((x) => Math.min(HIGHEST, Math.log10(Math.max(x, least))));
  const low = Math.floor(Math.min(-1, ...logs)), high = Math.ceil(Math.max(0.3, ...logs));
  const first = detail.positions[0], last = detail.positions[detail.positions.length - 1];
  const x = (p) => (last === first ? (LEFT + RIGHT) / 2 : LEFT + 8 + ((p - first) / (last - first)) * (RIGHT - LEFT - 16));
  const y = (log) => BOTTOM - ((log - low) / (high - low)) * (BOTTOM - TOP);
  const points = logs.map((log, i) => `${x(detail.positions[i]).toFixed(1)},${y(log).toFixed(1)}`);
  const inside = [];
  const step = Math.ceil((high - low) / 6);
  for (let n = Math.ceil(low / step) * step; n <= high; n += step) {
    inside.push(make("line", { class: "axis", x1: LEFT - 4, x2: LEFT, y1: y(n), y2: y(n) }), make("text", { x: LEFT - 8, y: y(n) + 4, "text-anchor": "end" }, (n === HIGHEST ? "≥" : "") + power(n)));
  }
  for (const p of new Set([first, detail.positions[Math.floor(detail.positions.length / 2)], last])) {
    inside.push(make("text", { x: x(p), y: BOTTOM + 16, "text-anchor": "middle" }, String(p)));
  }
  inside.push(make("line", { class: "limit", x1: LEFT, x2: RIGHT, y1: y(0), y2: y(0) }), make("text", { class: "limited", x: RIGHT, y: y(0) - 4, "text-anchor": "end" }, "limit"));
  inside.push(make("path", { class: "curve", d: `M${points.join("L")}` }));
  if (points.length <= 64) {
    points.forEach((at, i) => {
      const [cx, cy] = at.split(",");
      inside.push(make("circle", { class: "dot", cx, cy, r: 2.6 }, make("title", {}, `position ${detail.positions[i]}: ${brief(detail.errors[i])}`)));
    });
  }
  return chart("Error against position", "position", ...inside);
}

function section(title, ...content) {
  return make("section", {}, make("h3", {}, title), ...content);
}

function show(id) {
  const item = data.tensors[id];
  if (!item) return;
  for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.id === id));
  panel.hidden = false;
  panel.replaceChildren(
    make("h2", {}, make("span", { class: `badge v${item.level}` }, item.verdict), " ", item.place),
    make("p", { class: "soft" }, item.meaning));
  for (const line of item.lines) panel.append(make("p", {}, line));
  const pair = make("div", { class: "pair" });
  panel.append(pair);
  pair.append(section("Measures", table(["", ""], item.numbers, (i) => i === 1)));
  const detail = item.detail;
  if (detail) {
    if (detail.worst.length) {
      const limit = detail.each ? "bound" : "RMS limit";
      const rows = detail.worst.map((w) => [String(w[0]), String(w[1]), short(w[2]), short(w[3]), brief(w[4]), w[5] < 1e-30 ? "≈ 0" : brief(w[5])]);
      pair.append(section("Worst numbers", table(["position", "element", "ours", "theirs", "theirs − ours", limit], rows, () => true)));
    }
    const what = detail.each ? "largest error in units of its bound" : "RMS error in units of the limit";
    pair.append(section(`Error against position (${what})`, byPosition(detail)));
  }
}

function choose(id, scroll) {
  show(id);
  history.replaceState(null, "", `#${encodeURIComponent(id)}`);
  if (scroll) panel.scrollIntoView({ block: "nearest" });
}

// Arrow keys go from tensor to tensor; Tab goes past the heat map.
const cells = buttons.filter((button) => button.classList.contains("cell"));
cells.forEach((button, i) => { button.tabIndex = i === 0 ? 0 : -1; });
function neighbour(button, key) {
  const row = button.closest("tr"), column = button.closest("td").cellIndex;
  const sideways = key === "ArrowRight" ? 1 : key === "ArrowLeft" ? -1 : 0;
  const down = key === "ArrowDown" ? 1 : key === "ArrowUp" ? -1 : 0;
  for (let r = row.rowIndex + down, c = column + sideways; ; r += down, c += sideways) {
    const line = row.closest("table").rows[r];
    if (!line || c < 1 || c >= line.cells.length) return null;
    const next = line.cells[c].querySelector("button");
    if (next) return next;
  }
}
for (const button of buttons) button.addEventListener("click", () => choose(button.dataset.id, true));
for (const button of cells) {
  button.addEventListener("keydown", (event) => {
    if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
    const next = neighbour(button, event.key);
    if (!next) return;
    for (const other of cells) other.tabIndex = other === next ? 0 : -1;
    next.focus();
    choose(next.dataset.id, false);
  });
}

// The search dims what has another name. Enter chooses the first that is left.
const find = document.getElementById("find");
const named = () => buttons.filter((button) => button.dataset.id.toLowerCase().includes(find.value.trim().toLowerCase()));
find?.addEventListener("input", () => {
  const found = new Set(named());
  for (const button of buttons) button.classList.toggle("other", !found.has(button));
  document.getElementById("found").textContent = find.value.trim() && `${found.size} of ${buttons.length}`;
});
find?.addEventListener("keydown", (event) => { if (event.key === "Enter" && named().length) choose(named()[0].dataset.id, true); });

let wanted = "";
try { wanted = decodeURIComponent(location.hash.slice(1)); } catch { /* no name of a tensor */ }
const start = Object.hasOwn(data.tensors, wanted) ? wanted : data.start;
show(start);
const active = cells.find((button) => button.dataset.id === start);
if (active) {
  for (const other of cells) other.tabIndex = other === active ? 0 : -1;
  const frame = active.closest(".scroll"), at = active.getBoundingClientRect(), edge = frame.getBoundingClientRect();
  if (at.right > edge.right) frame.scrollLeft += at.left - edge.left - frame.clientWidth / 2; // the first wrong cell in the middle, where
  if (at.bottom > edge.bottom) frame.scrollTop += at.top - edge.top - frame.clientHeight / 2; // the map is larger than its frame
}
