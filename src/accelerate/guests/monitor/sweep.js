// ----------------------------------------------------------------- a sweep: settings and a result side by side
const SWEEP_HEIGHT = 236;
let sweepAsked = null, measureAsked = "", isLimiting = false;

function scaleOf(column, runs) {  // {at(value): 0 to 1 or null, ticks: [[place, text]], back(place): value, or null for texts}
  const known = runs.map(column.value).filter(isKnown), distinct = [...new Set(known)], text = v => column.text(v);
  const numbers = distinct.filter(real);
  if (numbers.length && (column.kind === "number" || numbers.length === distinct.length)) {
    const low = Math.min(...numbers), high = Math.max(...numbers);
    const on = t => v => !real(v) ? null : high === low ? 0.5 : (t(v) - t(low)) / (t(high) - t(low));
    // The scale on which the middle number lies nearer to the middle.
    const middle = numbers.sort((a, b) => a - b)[numbers.length >> 1], off = scale => Math.abs(scale(middle) - 0.5), linear = on(v => v);
    const log = low > 0 && high / low > 4 && off(on(Math.log)) < off(linear), at = log ? on(Math.log) : linear;
    const spaced = log ? logTicks(low, high) : niceTicks(low, high, 5), marks = column.kind === "setting" && numbers.length <= 6 ? numbers : spaced.length > 1 ? spaced : [low, high];
    return { at, ticks: marks.map(v => [at(v), text(v)]), back: p => log ? low * (high / low) ** p : low + p * (high - low) };
  }
  distinct.sort((a, b) => String(a).localeCompare(String(b), "en", { numeric: true }));
  const at = v => distinct.includes(v) ? (distinct.length > 1 ? distinct.indexOf(v) / (distinct.length - 1) : 0.5) : null, every = Math.ceil(distinct.length / 9);
  return { at, ticks: distinct.filter((_, i) => i % every === 0).map(v => [at(v), text(v)]), back: null };
}
function limit(column, comparisons) {  // in the filter, in place of what it says about this column now
  const kept = $("filter").value.replaceAll(COMPARISON, (term, name) => find(name)?.key === column.key ? "" : term), name = slug(column.name);
  $("filter").value = [kept.replaceAll(/\s+/g, " ").trim(), ...comparisons.map(([sign, value]) => `${name} ${sign} ${/\s/.test(value) ? `"${value}"` : value}`)].filter(Boolean).join(" ");
  show();
}

function showSweep(runs, shown) {
  const results = listedColumns.filter(c => c.kind === "number"), settings = shown.filter(c => c.kind === "setting"), box = $("plot");
  const can = settings.length > 0 && results.length > 0, isOn = can && (sweepAsked ?? folder.runs.length >= 5);
  $("sweep").hidden = !can; $("sweep").ariaPressed = String(isOn);
  $("measured").hidden = box.hidden = !isOn;
  if (!isOn || isLimiting) return;
  const evaluated = results.find(c => /^(eval|val|test)/.test(c.name)), measure = results.find(c => c.key === measureAsked) || evaluated || results[0];
  $("measure").replaceChildren(...results.map(c => Object.assign(html("option", "", c.title), { value: c.key, selected: c === measure })));
  const axes = [...settings, measure].map(column => ({ column, ...scaleOf(column, folder.runs) })), W = Math.max(box.clientWidth, 112 * axes.length), H = SWEEP_HEIGHT;
  const top = 34, bottom = H - 12, side = 56, x = i => side + i * (W - 2 * side) / (axes.length - 1), y = p => bottom - p * (bottom - top);
  const svg = node("svg", { viewBox: `0 0 ${W} ${H}`, width: W, height: H, role: "img", "aria-label": `${settings.map(c => c.title).join(", ")} and ${measure.title} of ${runs.length} runs` });
  const passes = new Set(runs), last = axes.at(-1);
  for (const r of [...folder.runs].sort((a, b) => passes.has(a) - passes.has(b))) {  // those that pass are drawn last
    const points = axes.map((a, i) => [x(i), a.at(a.column.value(r))]), t = points.at(-1)[1];
    const d = points.map(([px, p], i) => p === null ? "" : (i && points[i - 1][1] !== null ? "L" : "M") + px.toFixed(1) + " " + y(p).toFixed(1)).join("");
    if (!passes.has(r)) { node("path", { d, class: "left-out" }, svg); continue; }
    const line = node("g", { class: "line" }, svg);
    node("path", { d }, line).style.stroke = t === null ? color("faint") : `color-mix(in oklab, ${t < 0.5 ? "var(--blue), var(--pink)" : "var(--pink), var(--orange)"} ${Math.round(200 * (t < 0.5 ? t : t - 0.5))}%)`;
    node("path", { d, class: "hit" }, line);
    line.describe = event => {
      $("tip").replaceChildren(html("div", "dim", r.name));
      for (const { column } of axes) { const row = html("div", "", null, $("tip")); html("span", "", column.title, row); html("b", "", column.text(column.value(r)), row); }
      showTip(event);
    };
    line.onclick = () => { hideTip(); location.hash = "run=" + encodeURIComponent(r.run); };
  }
  axes.forEach((a, i) => {
    const title = a.column.title, head = node("text", { x: x(i), y: 14, class: "axis-title" }, svg, title.length > 16 ? title.slice(0, 15) + "…" : title);
    node("title", {}, head, title);
    node("line", { x1: x(i), x2: x(i), y1: top, y2: bottom, stroke: color("axis") }, svg);
    const bar = node("rect", { x: x(i) - 9, width: 18, y: top - 6, height: bottom - top + 12, class: "bar" + (a.back ? "" : " texts") }, svg), mark = node("rect", { x: x(i) - 6, width: 12, class: "chosen" }, svg);
    for (const [p, text] of a.ticks) {
      const end = a === last, label = node("text", { x: x(i) + (end ? 9 : -9), y: y(p) + 4, class: "tick", "text-anchor": end ? "start" : "end" }, svg, text.length > 9 ? text.slice(0, 8) + "…" : text);
      if (!a.back) { label.classList.add("choice"); label.onclick = () => limit(a.column, [["=", text]]); }
    }
    if (!a.back) return;
    const placeOf = event => { const b = svg.getBoundingClientRect(); return Math.min(1, Math.max(0, (bottom - (event.clientY - b.top) * H / b.height) / (bottom - top))); };
    let from = null;
    bar.onpointerdown = event => { from = placeOf(event); isLimiting = true; bar.setPointerCapture(event.pointerId); };
    bar.onpointermove = event => {
      if (from === null) return;
      const to = placeOf(event);
      mark.setAttribute("y", y(Math.max(from, to))); mark.setAttribute("height", Math.abs(y(from) - y(to)));
    };
    bar.onpointercancel = () => { from = null; isLimiting = false; };
    bar.onpointerup = event => {
      const [low, high] = [from, placeOf(event)].sort((p, q) => p - q);
      from = null; isLimiting = false;
      const limits = [low > 0.01 && [">=", plain(a.back(low), 6)], high < 0.99 && ["<=", plain(a.back(high), 6)]];
      limit(a.column, high - low < 0.02 ? [] : limits.filter(Boolean));  // a click takes the limits away
    };
  });
  const scrolled = box.scrollLeft;
  box.replaceChildren(svg);
  box.scrollLeft = scrolled;
}
$("plot").onpointermove = event => { const line = event.target.closest(".line"); if (line) line.describe(event); else hideTip(); };
$("plot").onpointerleave = hideTip;
$("sweep").onclick = () => { sweepAsked = $("sweep").ariaPressed !== "true"; show(); };
$("measure").onchange = event => { measureAsked = event.target.value; show(); };
