"use strict";
const STILL = /*DATA*/null/*DATA*/;
const $ = id => document.getElementById(id);
const NS = "http://www.w3.org/2000/svg";
const PALETTE = ["blue", "orange", "green", "purple", "pink", "teal", "olive", "red"];
let data = null, hover = null, lost = false;  // hover and zoom are places on the axis that is chosen
let axis = "step", zoom = null;
const charts = new Map();
let drawn = [];  // the charts' boxes, in the order of the page

// ---------------------------------------------------------------------------------------------- numbers as text
const exponential = (v, decimals) => v.toExponential(decimals).replace(/\.?0+e/, "e").replace("e+", "e");
const real = v => typeof v === "number" && Number.isFinite(v);
function plain(v, digits = 4) {
  if (!real(v)) return v === null || v === undefined ? "–" : String(v);
  const a = Math.abs(v);
  if (a !== 0 && (a < 1e-3 || a >= 1e6)) return exponential(v, digits - 2);
  return String(+v.toPrecision(digits));
}
const grouped = v => real(v) ? v.toLocaleString("en-US") : "–";
function rate(v, digits = 3) {
  if (!real(v)) return ["–", ""];
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) if (v >= size) return [+(v / (unit === "k" ? 1e3 : size)).toPrecision(digits) + "", unit];
  return [v >= 100 ? grouped(digits > 3 ? +v.toPrecision(digits) : Math.round(v)) : String(+v.toPrecision(digits)), ""];
}
function seconds(v, digits = 3) {
  if (!real(v)) return ["–", ""];
  if (v === 0) return ["0", ""];
  if (v < 1e-3) return [String(+(v * 1e6).toPrecision(digits)), "µs"];
  if (v < 1) return [String(+(v * 1e3).toPrecision(digits)), "ms"];
  return [String(+v.toPrecision(digits)), "s"];
}
function bytes(v, digits = 3) {
  if (!real(v)) return ["–", ""];
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"]]) if (v >= size) return [String(+(v / size).toPrecision(digits)), unit];
  return v ? [String(Math.round(v / 1e3)), "kB"] : ["0", ""];
}
const joined = ([v, unit]) => unit ? v + " " + unit : v;
function duration(s) {
  if (!real(s)) return "–";
  s = Math.round(s);
  const h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60, two = n => String(n).padStart(2, "0");
  return h ? `${h}:${two(m)}:${two(s % 60)}` : `${m}:${two(s % 60)}`;
}
function scientific(v, digits = 4) { return real(v) && v !== 0 && Math.abs(v) < 1e-2 ? exponential(v, digits - 2) : plain(v, digits); }
const FORMATS = {
  plain, scientific, seconds: (v, digits) => joined(seconds(v, digits)), bytes: (v, digits) => joined(bytes(v, digits)), rate: (v, digits) => rate(v, digits).join(""),
  share: (v, digits = 3) => real(v) ? +(100 * v).toPrecision(digits) + " %" : "–",
};

// ---------------------------------------------------------------------------------------------------- drawing
function node(name, attributes = {}, parent = null, text = null) {
  const e = document.createElementNS(NS, name);
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  if (text !== null) e.textContent = text;
  if (parent) parent.appendChild(e);
  return e;
}
function html(name, cls = "", text = null, parent = null) {
  const e = document.createElement(name);
  if (cls) e.className = cls;
  if (text !== null) e.textContent = text;
  if (parent) parent.appendChild(e);
  return e;
}
const color = name => `var(--${name})`;

function niceTicks(low, high, count) {
  const span = high - low || Math.abs(high) || 1, raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(f => f * power).find(s => s >= raw * 0.999);
  const ticks = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-9; t += step) ticks.push(Math.abs(t) < step * 1e-9 ? 0 : t);
  return ticks;
}
function timeTicks(low, high, count) {
  const step = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400].find(s => s >= (high - low) / count);
  if (!step || high - low < 3) return niceTicks(low, high, count);
  const ticks = [];
  for (let t = Math.ceil(low / step) * step; t <= high; t += step) ticks.push(t);
  return ticks;
}
function logTicks(low, high) {
  const ticks = [], factors = Math.log10(high / low) > 2.5 ? [1] : [1, 2, 5];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
    for (const f of factors) if (f * 10 ** p >= low * 0.999 && f * 10 ** p <= high * 1.001) ticks.push(f * 10 ** p);
  return ticks;
}
function smoothed(values, weight) {
  let last = 0, norm = 0;
  return values.map(v => {
    if (!real(v)) return null;
    last = last * weight + (1 - weight) * v; norm = norm * weight + (1 - weight);
    return last / norm;
  });
}
// The curve as it is reported, faint, and smoothed; or only as it is.
function lines(name, tone, c, weight, extra = {}) {
  const own = { name, color: tone, ...extra, ...c };
  if (!(weight > 0) || c.steps.length < 20) return [own];  // an evaluation after each epoch is shown as it is
  return [{ ...own, faint: true }, { name: "smoothed", color: tone, ...extra, steps: c.steps, values: smoothed(c.values, weight) }];
}

// ------------------------------------------------------------------------------------------- steps, time, epochs
function interpolated(at, from, to) {  // beyond the ends it goes on as it did there
  if (from.length < 2) return from.length ? to[0] + at - from[0] : at;
  let i = 1;
  { let a = 1, b = from.length - 1; while (a < b) { const m = (a + b) >> 1; if (from[m] < at) a = m + 1; else b = m; } i = a; }
  return to[i - 1] + (to[i] - to[i - 1]) * (at - from[i - 1]) / (from[i] - from[i - 1] || 1);
}
function epochEnds(doc) {  // [steps, epochs done]
  const ends = new Map([[0, 0]]);
  for (const e of doc.events) if (e.event === "epoch" && Number.isInteger(e.step) && Number.isInteger(e.epoch) && e.step > 0) ends.set(e.step, e.epoch + 1);
  const steps = [...ends.keys()].sort((a, b) => a - b);
  return [steps, steps.map(s => ends.get(s))];
}
function places(steps, doc) {  // of steps on the axis that is chosen
  if (axis === "time" && doc.clock.steps.length) return steps.map(s => Math.max(0, interpolated(s, doc.clock.steps, doc.clock.times) - doc.began));
  if (axis === "epoch") { const [from, to] = epochEnds(doc); return from.length > 1 ? steps.map(s => interpolated(s, from, to)) : steps; }
  return steps;
}
const hasEpochs = doc => doc.events.some(e => e.event === "epoch" && Number.isInteger(e.epoch));
const AXES = {
  step: { label: "step", text: v => grouped(Math.round(v)), ticks: (a, b, n) => niceTicks(a, b, n).filter(s => Number.isInteger(+s.toFixed(6))) },
  time: { label: "time since the start", text: v => duration(v), ticks: timeTicks },
  epoch: { label: "epoch", text: v => String(+v.toPrecision(4)), ticks: niceTicks },
};

function path(steps, values, x, y) {
  let d = "", open = false;
  for (let i = 0; i < steps.length; i++) {
    if (!real(values[i])) { open = false; continue; }
    d += (open ? "L" : "M") + x(steps[i]).toFixed(1) + " " + y(values[i]).toFixed(1);
    open = true;
  }
  return d;
}
function area(steps, low, high, x, y) {
  const i = steps.map((_, n) => n).filter(n => real(low[n]) && real(high[n]));
  if (i.length < 2) return "";
  return "M" + i.map(n => x(steps[n]).toFixed(1) + " " + y(high[n]).toFixed(1)).join("L") +
    "L" + i.reverse().map(n => x(steps[n]).toFixed(1) + " " + y(low[n]).toFixed(1)).join("L") + "Z";
}

const place = () => $(view.kind === "compare" ? "compared" : "charts");
function card(id, width) {
  let c = charts.get(id);
  if (!c) {
    const box = html("section", "card chart " + width, null, place());
    const head = html("div", "head", null, box);
    const title = html("h2", "", null, head), legend = html("div", "legend", null, head);
    const svg = node("svg", { role: "img" }, box);
    c = { id, box, title, legend, svg, drag: null };
    charts.set(id, c);
    c.width = width;
    box.addEventListener("pointermove", e => pointed(c, e));
    box.addEventListener("pointerleave", () => { hover = c.drag = null; hideTip(); crosshairs(); });
    svg.addEventListener("pointerdown", e => { c.drag = placeAt(c, e); if (c.drag !== null) svg.setPointerCapture(e.pointerId); });
    svg.addEventListener("pointerup", e => {
      const from = c.drag, to = from === null ? null : placeAt(c, e, true), s = c.scale;
      c.drag = null;
      if (to === null || !s || Math.abs(s.x(from) - s.x(to)) <= 6) return;
      zoom = e.shiftKey && zoom ? zoom.map(v => v + from - to) : [Math.min(from, to), Math.max(from, to)];  // with shift the part moves
      show();
    });
    svg.addEventListener("dblclick", () => { zoom = null; show(); });
  }
  if (c.width !== width) { c.box.classList.replace(c.width, width); c.width = width; }
  return c;
}

// spec: {title, unit, series: [{name, color, steps, values, low, high, bad, faint}], stack, format, zero, log, height, marks}
function draw(id, width, spec) {
  const c = card(id, width);
  drawn.push(c.box);
  c.spec = spec;
  c.title.textContent = spec.title;
  if (spec.unit) html("span", "unit", spec.unit, c.title);
  c.legend.replaceChildren();
  const shown = spec.series.filter(s => !s.faint);
  if (shown.length > 1) for (const s of shown) {
    const item = html("span", "", null, c.legend), swatch = html("i", spec.stack ? "area" : "", null, item);
    swatch.style.background = color(s.color);
    item.append(s.name);
  }
  if (spec.marks && data.events.some(e => e.event === "save")) {
    const item = html("span", "", null, c.legend), dot = html("i", "dot", null, item);
    dot.style.background = color("green");
    item.append("saved");
  }
  const W = Math.max(260, c.svg.clientWidth || c.box.clientWidth - 34), H = spec.height || 190;
  const svg = c.svg;
  svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
  svg.setAttribute("height", H);
  svg.setAttribute("aria-label", `${spec.title}${spec.unit ? " in " + spec.unit : ""} by ${AXES[axis].label}`);
  svg.replaceChildren();
  for (const s of spec.series) s.xs = places(s.steps, s.doc || data);
  const everything = spec.series.flatMap(s => s.xs), all = zoom ? everything.filter(v => v >= zoom[0] && v <= zoom[1]) : everything;
  const inside = (values, xs) => zoom ? values.filter((_, i) => xs[i] >= zoom[0] && xs[i] <= zoom[1]) : values;
  if (!all.length) { node("text", { x: W / 2, y: H / 2, "text-anchor": "middle", fill: color("faint"), "font-size": 13 }, svg, everything.length ? "nothing in this part" : spec.none || "no numbers yet"); c.scale = null; return; }

  let stackTop = null;
  if (spec.stack) { let below = spec.series[0].steps.map(() => 0); stackTop = spec.series.map(s => below = s.values.map((v, i) => (real(v) ? v : 0) + below[i])); }
  let ys = (spec.stack ? stackTop.flatMap((top, n) => inside(top, spec.series[n].xs)) : spec.series.flatMap(s => [s.values, s.low || [], s.high || []].flatMap(v => inside(v, s.xs)))).filter(real);
  const log = spec.log && ys.length && Math.min(...ys) > 0;
  let low = Math.min(...ys), high = Math.max(...ys);
  if (!ys.length) { low = 0; high = 1; }
  if (!log) {
    // From zero only where that leaves the change visible.
    const zero = spec.stack || (spec.zero && low < 0.6 * high);
    if (zero) low = Math.min(0, low);
    if (spec.robust && ys.length > 30) {  // one early peak must not flatten the rest
      const sorted = [...ys].sort((a, b) => a - b), q = sorted[Math.floor(0.985 * sorted.length)];
      if (high - low > 4 * (q - low)) high = low + 1.15 * (q - low);
    }
    if (high === low) { const pad = Math.abs(high) * 0.1 || 1; low = zero ? low : low - pad; high += pad; }
    if (!zero && high - low < 0.01 * Math.abs(high)) { const pad = 0.005 * Math.abs(high) - (high - low) / 2; low -= pad; high += pad; }
    const pad = (high - low) * 0.06;
    high += pad; if (!(zero && low === 0)) low -= pad;
  } else if (high === low) { high *= 2; low /= 2; }
  const format = FORMATS[spec.format || "plain"];
  const ticks = !ys.length ? [] : log ? logTicks(low, high) : niceTicks(low, high, H > 240 ? 6 : 4);
  // As many digits as tell ticks near each other apart.
  const apart = log || ticks.length < 2 ? 0 : Math.ceil(Math.log10(Math.max(...ticks.map(Math.abs)) / (ticks[1] - ticks[0]))) + 2;
  const labels = ticks.map(v => apart > 3 ? format(v, Math.min(apart, 9)) : format(v));
  const left = Math.max(0, ...labels.map(t => t.length)) * 6.9 + 14, right = 10, top = 10, bottom = 36;
  const first = zoom ? zoom[0] : Math.min(...all), last = zoom ? zoom[1] : Math.max(...all), spanX = last - first || 1;
  const x = s => left + (s - first) / spanX * (W - left - right);
  const t = log ? v => Math.log(Math.max(v, low)) : v => v, lo = t(low), hi = t(high);
  const y = v => Math.max(top - 4, top + (hi - t(v)) / (hi - lo || 1) * (H - top - bottom));
  c.scale = { x, y, left, right: W - right, top, bottom: H - bottom, first, last, W, H, stackTop };

  ticks.forEach((v, i) => {
    node("line", { x1: left, x2: W - right, y1: y(v), y2: y(v), stroke: color(v === 0 ? "axis" : "grid") }, svg);
    node("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end", fill: color("soft"), "font-size": 11.5 }, svg, labels[i]);
  });
  node("line", { x1: left, x2: W - right, y1: H - bottom, y2: H - bottom, stroke: color("axis") }, svg);
  for (const s of AXES[axis].ticks(first, last, Math.max(3, Math.floor(W / 90)))) {
    node("line", { x1: x(s), x2: x(s), y1: H - bottom, y2: H - bottom + 4, stroke: color("axis") }, svg);
    node("text", { x: x(s), y: H - bottom + 17, "text-anchor": "middle", fill: color("soft"), "font-size": 11.5 }, svg, AXES[axis].text(s));
  }
  node("text", { x: W - right, y: H - 3, "text-anchor": "end", fill: color("faint"), "font-size": 11.5 }, svg, AXES[axis].label);
  if (!ys.length) node("text", { x: W / 2, y: H / 2, "text-anchor": "middle", fill: color("red"), "font-size": 13 }, svg, "not one finite number");

  // What lies outside of the part that is shown is cut off.
  const clip = "clip-" + [...charts.keys()].indexOf(id);
  node("rect", { x: left, y: 0, width: Math.max(0, W - left - right + 3), height: H - bottom + 4 }, node("clipPath", { id: clip }, svg));
  const plot = zoom ? node("g", { "clip-path": `url(#${clip})` }, svg) : svg;
  spec.series.forEach((s, n) => {
    if (spec.stack) {
      const under = n ? stackTop[n - 1] : s.steps.map(() => 0);
      node("path", { d: area(s.xs, under, stackTop[n], x, y), fill: color(s.color), "fill-opacity": .28 }, plot);
      node("path", { d: path(s.xs, stackTop[n], x, y), fill: "none", stroke: color(s.color), "stroke-width": 1.5 }, plot);
      return;
    }
    if (s.low) node("path", { d: area(s.xs, s.low, s.high, x, y), fill: color(s.color), "fill-opacity": .13 }, plot);
    const count = s.values.filter(real).length;
    node("path", { d: path(s.xs, s.values, x, y), fill: "none", stroke: color(s.color), "stroke-width": s.faint ? 1.2 : 2, "stroke-opacity": s.faint ? .32 : 1, "stroke-linejoin": "round", "stroke-linecap": "round" }, plot);
    if (count === 1 || (!s.faint && count && count <= 12)) s.xs.forEach((at, i) => real(s.values[i]) && node("circle", { cx: x(at), cy: y(s.values[i]), r: 2.6, fill: color(s.color) }, plot));
    for (const at of places(s.bad || [], s.doc || data)) if (at >= first && at <= last) node("path", { d: `M${x(at) - 4} ${top}l8 8m0 -8l-8 8`, stroke: color("red"), "stroke-width": 2, fill: "none" }, svg);
  });
  if (spec.marks) marks(svg, c.scale);
  c.cross = node("g", { "pointer-events": "none" }, svg);
  crosshair(c);
}

const MARKS = {
  save: ["green", "✓"], load: ["blue", "↺"], restart: ["purple", "↻"], start: ["blue", "▸"], stop: ["red", "■"], error: ["red", "✕"],
  non_finite: ["red", "✕"], warning: ["amber", "▲"], epoch: ["faint", "·"], end: ["faint", "◂"], note: ["teal", "•"],
  killed: ["red", "✕"], preempted: ["amber", "↻"],
};
function marks(svg, s) {
  for (const e of data.events) {
    if (!["save", "restart", "load", "stop", "non_finite", "note"].includes(e.event)) continue;
    const step = Number.isInteger(e.step) ? e.step : null;
    const at = step === null ? null : places([step], data)[0];
    if (at === null || at < s.first || at > s.last) continue;
    const [tone] = MARKS[e.event], px = s.x(at);
    const g = node("g", {}, svg);
    node("title", {}, g, `${title(e)} · step ${grouped(step)}`);
    if (e.event === "save" || e.event === "note") { node("circle", { cx: px, cy: s.bottom, r: 4, fill: color(tone), stroke: color("card"), "stroke-width": 1.5 }, g); continue; }
    node("line", { x1: px, x2: px, y1: s.top, y2: s.bottom, stroke: color(tone), "stroke-width": 1.4, "stroke-dasharray": "4 4" }, g);
    node("text", { x: Math.min(px + 5, s.right - 46), y: s.top + 9, fill: color(tone), "font-size": 11.5, "font-weight": 600 }, g, { restart: "restart", load: "resumed", stop: "stop", non_finite: "NaN" }[e.event]);
  }
}

// ------------------------------------------------------------------------------------------------------ pointing
function nearest(steps, step) {
  let a = 0, b = steps.length - 1;
  while (a < b) { const m = (a + b) >> 1; if (steps[m] < step) a = m + 1; else b = m; }
  return a > 0 && step - steps[a - 1] < steps[a] - step ? a - 1 : a;
}
function placeAt(c, event, anywhere = false) {  // on the axis; null beside the plot
  const s = c.scale, box = c.svg.getBoundingClientRect();
  if (!s) return null;
  const px = (event.clientX - box.left) * s.W / box.width;
  if (!anywhere && (px < s.left - 4 || px > s.right + 4 || event.clientY < box.top)) return null;
  return Math.min(s.last, Math.max(s.first, s.first + (px - s.left) / (s.right - s.left || 1) * (s.last - s.first)));
}
function pointed(c, event) {
  const raw = placeAt(c, event, real(c.drag));
  if (raw === null) { hover = null; hideTip(); crosshairs(); return; }
  const nearby = c.spec.series.filter(line => line.xs.length).map(line => line.xs[nearest(line.xs, raw)]);
  hover = nearby.reduce((a, b) => Math.abs(b - raw) < Math.abs(a - raw) ? b : a, nearby[0]);
  crosshairs();
  const tip = $("tip"), format = FORMATS[c.spec.format || "plain"];
  tip.replaceChildren();
  const known = c.spec.series.find(line => line.xs.length), step = known.steps[nearest(known.xs, hover)];
  html("div", "dim", axis === "step" ? "step " + grouped(hover) : `${axis} ${AXES[axis].text(hover)}${known.doc ? "" : " · step " + grouped(step)}`, tip);
  for (const line of c.spec.series) {
    if (!line.steps.length) continue;
    const row = html("div", "", null, tip), i = nearest(line.xs, hover);
    html("span", "", line.faint ? "as reported" : line.name, row);
    html("b", "", (line.bad || []).includes(line.steps[i]) ? "not finite" : format(line.values[i]), row);
  }
  showTip(event);
}
const hideTip = () => { $("tip").style.display = "none"; };
function showTip(event) {  // beside the pointer
  const tip = $("tip");
  tip.style.display = "block";
  const w = tip.offsetWidth, h = tip.offsetHeight;
  tip.style.left = (event.clientX + 16 + w > innerWidth ? event.clientX - w - 14 : event.clientX + 16) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - h - 8) + "px";
}
function crosshair(c) {
  if (!c.cross) return;
  c.cross.replaceChildren();
  const s = c.scale;
  if (hover === null || !s || hover < s.first || hover > s.last) return;
  node("line", { x1: s.x(hover), x2: s.x(hover), y1: s.top, y2: s.bottom, stroke: color("faint"), "stroke-dasharray": "2 3" }, c.cross);
  if (real(c.drag)) node("rect", { x: Math.min(s.x(c.drag), s.x(hover)), width: Math.abs(s.x(c.drag) - s.x(hover)), y: s.top, height: s.bottom - s.top, fill: color("blue"), "fill-opacity": .12 }, c.cross);
  c.spec.series.forEach((line, n) => {
    if (line.faint || !line.steps.length) return;
    const i = nearest(line.xs, hover), v = s.stackTop ? s.stackTop[n][i] : line.values[i];
    if (real(v)) node("circle", { cx: s.x(line.xs[i]), cy: s.y(v), r: 3.6, fill: color(line.color), stroke: color("card"), "stroke-width": 1.5 }, c.cross);
  });
}
const crosshairs = () => charts.forEach(crosshair);

