// ------------------------------------------------------------------------------------------------------ the page
const isCpu = () => String(data.facts.device || "cpu").startsWith("cpu");
const curve = name => data.curves[name] || { steps: [], values: [] };
function tile(parent, name, [value, unit], note = "") {
  const t = html("div", "card tile", null, parent);
  html("div", "name", name, t);
  const v = html("div", "value", value, t);
  if (unit) html("span", "unit", unit, v);
  const n = html("div", "note", note, t);
  n.title = note;
}
function tiles() {
  const box = $("tiles"), n = data.newest, loss = curve("loss"), finite = loss.values.filter(real);
  box.replaceChildren();
  tile(box, "Loss", [plain(n.loss)], finite.length > 1 ? `lowest ${plain(Math.min(...finite))}` : "");
  const tokens = n.tokens_per_second !== undefined, [v, unit] = rate(tokens ? n.tokens_per_second : n.samples_per_second);
  tile(box, "Throughput", [v, `${unit ? unit + " " : ""}${tokens ? "tokens" : "samples"}/s`], data.num_ranks > 1 ? `${grouped(data.num_ranks)} ranks together` : "one rank");
  tile(box, "Step time", seconds(n.step_seconds), data.skew && data.skew.share > .02 ? `rank ${data.skew.rank} is ${Math.round(100 * data.skew.share)} % slower` : data.skew ? "all ranks alike" : "");
  if (n.wait_seconds !== undefined) tile(box, "Waiting for data", [n.step_seconds ? String(+(100 * n.wait_seconds / n.step_seconds).toPrecision(2)) : "–", "%"], `${joined(seconds(n.wait_seconds))} a step`);
  const memory = data.ranks.map(r => r.memory_bytes).filter(real);
  tile(box, "Memory", memory.length ? bytes(Math.max(...memory)) : ["–", ""], isCpu() ? "host, fullest rank" : "peak, fullest rank");
  if (n.mfu !== undefined) tile(box, "MFU", [String(+(100 * n.mfu).toPrecision(3)), "%"], "of the devices' peak");
  if (n.learning_rate !== undefined) tile(box, "Learning rate", [scientific(n.learning_rate)]);
  if (n.gradient_norm !== undefined) tile(box, "Gradient norm", [plain(n.gradient_norm)], "before clipping");
  if (n.device_utilization !== undefined) tile(box, "Device busy", [String(Math.round(100 * n.device_utilization)), "%"], isCpu() ? "of rank 0's threads" : "rank 0");
  if (n.eta_seconds !== undefined && data.state === "running") tile(box, "Time left", [duration(n.eta_seconds)], `to step ${grouped(n.total_steps)}`);
  // More than seven stand in two rows, and the last one fills the second.
  const count = box.children.length, columns = count > 7 ? Math.ceil(count / 2) : count;
  box.style.setProperty("--columns", columns);
  box.lastChild.style.setProperty("--span", count > 7 && count % 2 ? 2 : 1);
}
function plots() {
  drawn = [];
  const weight = +$("smooth").value, loss = curve("loss"), wait = curve("wait_seconds"), step = curve("step_seconds");
  draw("loss", "w8", { title: "Loss", unit: [data.facts.watched_by === "launcher" && data.num_ranks > 1 ? "rank 0" : data.num_ranks > 1 ? "mean of all ranks" : "", weight > 0 ? "smoothed" : ""].filter(Boolean).join(", "), series: lines("loss", "blue", loss, weight), height: 300, marks: true, robust: true, none: real(data.newest.step) ? "the run reports no loss: run.step(loss), or accelerator.backward(loss)" : "no numbers yet", log: $("log").getAttribute("aria-pressed") === "true" });
  const waits = new Map(wait.steps.map((s, i) => [s, wait.values[i]]));
  const split = wait.steps.length
    ? [{ name: "computing", color: "blue", steps: step.steps, values: step.values.map((v, i) => real(v) ? v - (waits.get(step.steps[i]) || 0) : null) },
       { name: "waiting for data", color: "orange", steps: step.steps, values: step.steps.map(s => waits.get(s) || 0) }]
    : [{ name: "step", color: "blue", ...step }];
  draw("split", "w4", { title: "Step time", unit: data.num_ranks > 1 ? "rank 0" : "", series: split, stack: true, zero: true, format: "seconds", height: 300 });
  // The script's own metrics, such as those of an evaluation.
  const own = Object.entries(data.own), rest = own.length % 3;  // the last row is filled
  own.forEach(([name, c], i) => draw("own " + name, i >= own.length - rest ? (rest === 1 ? "w12" : "w6") : "w4", { title: name, unit: lastOf(name, c), series: lines(name, PALETTE[(i + 5) % PALETTE.length], c, weight) }));
  const tokens = data.curves.tokens_per_second;
  // The third row is filled, whatever is in it.
  const known = curve("learning_rate").steps.length > 0, third = ["w6", "w4", "w3"][(known ? 1 : 0) + (data.curves.mfu ? 1 : 0)];
  draw("rate", third, { title: "Throughput", unit: tokens ? "tokens/s" : "samples/s", series: [{ name: "all ranks", color: "green", ...(tokens || curve("samples_per_second")) }], zero: true, format: "rate" });
  perRank("memory", third, "Memory", "memory_bytes", "bytes");
  if (known) draw("lr", third, { title: "Learning rate", series: [{ name: "learning rate", color: "purple", ...curve("learning_rate") }], zero: true, format: "scientific" });
  if (data.curves.mfu) draw("mfu", third, { title: "MFU", unit: "share of the devices' peak", series: [{ name: "MFU", color: "teal", ...data.curves.mfu }], zero: true, format: "share" });
  const norm = data.curves.gradient_norm, busy = Object.keys((data.per_rank.device_utilization || { lines: {} }).lines).length > 0, fourth = norm && busy ? "w6" : "w12";
  if (norm) draw("gradient_norm", fourth, { title: "Gradient norm", unit: "before clipping", series: lines("gradient norm", "pink", norm, weight), robust: true, zero: true });
  if (busy) perRank("busy", fourth, "Device busy", "device_utilization", "share", isCpu() ? "CPU time of the rank's threads" : "");
  if (data.num_ranks > 1) {
    perRank("steps", "w6", "Step time of each rank", "step_seconds", "seconds");
    perRank("waits", "w6", "Waiting for data, each rank", "wait_seconds", "seconds");
  }
  settle();
}
function lastOf(name, c) {
  const i = c.values.findLastIndex(real);
  return i < 0 ? "" : `${plain(real(data.newest[name]) ? data.newest[name] : c.values[i])} at step ${grouped(c.steps[i])}`;
}
function settle() {  // the charts that were drawn are those of the page, in this order
  for (const [id, c] of charts) if (!drawn.includes(c.box)) { c.box.remove(); charts.delete(id); }
  // A chart whose first numbers come late has its place all the same.
  if (drawn.some((box, i) => place().children[i] !== box)) place().append(...drawn);
}
function perRank(id, width, title, name, format, unit = "") {
  const lines = Object.entries((data.per_rank[name] || { lines: {} }).lines);
  draw(id, width, { title, unit: [unit, data.num_followed < data.num_ranks ? `${data.num_followed} of ${grouped(data.num_ranks)} ranks` : ""].filter(Boolean).join(", "), series: lines.map(([label, c], i) => ({ name: label, color: PALETTE[i % PALETTE.length], ...c })), zero: true, format });
}
function ago(time) {
  const s = Math.max(0, data.now - time);
  return s < 5 ? "now" : s < 90 ? `${Math.round(s)} s ago` : s < 5400 ? `${Math.round(s / 60)} min ago` : new Date(1000 * time).toLocaleString();
}
function ranks() {
  const head = $("rank-head"), body = $("rank-body");
  head.replaceChildren(); body.replaceChildren();
  spread();
  const row = html("tr", "", null, head);
  const large = data.num_ranks > data.ranks.length;
  for (const name of ["Rank", large ? "" : "Device", "Step", "Step time", "Data wait", "Memory", "Last update", large ? "Stands out by" : ""].filter(Boolean)) html("th", name === "Device" ? "device" : "", name, row);
  const longest = Math.max(...data.ranks.map(r => r.step_seconds || 0));
  for (const r of [...data.ranks].sort((a, b) => !a.why - !b.why)) {
    const tr = html("tr", "", null, body);
    html("td", "", `${r.rank}`, tr);
    if (!large) html("td", "device", r.device || "–", tr);
    html("td", "", grouped(r.step), tr);
    const time = html("td", "", joined(seconds(r.step_seconds)), tr), bar = html("span", "split", null, time);
    if (real(r.step_seconds) && longest) {
      const wait = Math.min(r.wait_seconds || 0, r.step_seconds);
      html("b", "", null, bar).style.width = 100 * (r.step_seconds - wait) / longest + "%";
      html("u", "", null, bar).style.width = 100 * wait / longest + "%";
    }
    html("td", "", joined(seconds(r.wait_seconds)), tr);
    html("td", "", joined(bytes(r.memory_bytes)), tr);
    const last = html("td", large ? "why" : "", r.state === "running" ? ago(r.seen) : r.state, tr);
    if (["failed", "stopped"].includes(r.state)) last.style.color = color("bad");
    if (r.state === "silent") { last.style.color = color("warn"); last.textContent = ago(r.seen); }
    if (large) html("td", "why", r.why, tr);
  }
}
function spread() {  // of more ranks than are listed
  const table = $("spread"), shown = Object.entries(data.spread), large = data.num_ranks > data.ranks.length;
  $("ranks").textContent = large ? `Ranks: ${data.ranks.length} of ${grouped(data.num_ranks)}` : "Ranks";
  $("states").hidden = table.hidden = !large;
  if (!large) return;
  $("states").textContent = Object.entries(data.states).map(([state, n]) => `${grouped(n)} ${state}`).join("  ·  ");
  table.replaceChildren();
  const row = html("tr", "", null, table);
  for (const name of ["Over all ranks", "Smallest", "Middle", "90 %", "99 %", "Largest"]) html("th", "", name, row);
  for (const [name, s] of shown) {
    const tr = html("tr", "", null, table), format = name === "memory_bytes" ? FORMATS.bytes : FORMATS.seconds;
    html("td", "", { step_seconds: "Step time", wait_seconds: "Data wait", memory_bytes: "Memory" }[name], tr);
    for (const v of [s.smallest, s.middle, s.ninetieth, s.ninety_ninth, s.largest]) html("td", "", format(v), tr);
  }
}
function title(e) {
  const name = (e.folder || "").split("/").pop();
  switch (e.event) {
    case "start": return `Started${e.num_ranks > 1 ? " on " + grouped(e.num_ranks) + " ranks" : ""}`;
    case "restart": return `Restarted (attempt ${e.attempt})`;
    case "save": return `Saved ${name} in ${joined(seconds(e.seconds))}`;
    case "load": return `Resumed from ${name || "a checkpoint"}`;
    case "epoch": return `Epoch ${e.epoch} done`;
    case "end": return "Finished";
    case "stop": return "Stopped: " + e.text;
    case "error": return "Failed: " + e.text;
    case "killed": return "Ended: " + e.text;
    case "preempted": return `Preempted by ${e.text}, after ${name} was saved`;
    default: return e.text || e.event;
  }
}
function list() {
  const box = $("events");
  box.replaceChildren();
  if (!data.events.length) html("li", "blank", "Nothing has happened yet.", box);
  for (const e of [...data.events].reverse()) {
    const [tone, sign] = MARKS[e.event] || ["faint", "·"], li = html("li", "", null, box);
    const mark = html("span", "mark", sign, li);
    mark.style.color = color(tone);
    html("time", "", new Date(1000 * e.time).toLocaleTimeString("en-GB"), li);
    const p = html("p", "", title(e), li);
    if (e.times > 1) html("b", "who", `  × ${e.times}`, p);
    const who = [Number.isInteger(e.step) && e.event !== "start" ? "step " + grouped(e.step) : "", e.num_ranks < data.num_ranks ? "rank " + e.ranks.join(", ") + (e.num_ranks > e.ranks.length ? ` and ${grouped(e.num_ranks - e.ranks.length)} more` : "") : ""].filter(Boolean).join(" · ");
    if (who) html("span", "who", "  " + who, p);
  }
}
function facts() {  // what the run was started with, and the end of what it printed
  const shown = Object.entries(data.settings).filter(([name]) => name !== "command");
  $("settings").hidden = !shown.length && !data.settings.command;
  $("command").textContent = data.settings.command || "";
  $("command").hidden = !data.settings.command;
  pairs($("pairs"), shown);
  $("output").hidden = !data.output;
  for (const [id, width, other] of [["settings", "w5", "output"], ["output", "w7", "settings"]]) $(id).className = "card list " + ($(other).hidden ? "w12" : width);
  if (!data.output) return;
  const box = $("lines"), follows = box.scrollHeight - box.scrollTop - box.clientHeight < 30;
  $("file").textContent = data.output.file;
  box.textContent = data.output.lines.join("\n");
  if (follows) box.scrollTop = box.scrollHeight;
}
const worded = v => v === null || v === undefined ? "–" : real(v) ? String(+v.toPrecision(7)) : typeof v === "object" ? JSON.stringify(v) : String(v);
function pairs(table, rows) {
  table.replaceChildren();
  for (const [name, value] of rows) {
    const tr = html("tr", "", null, table);
    html("td", "", name.replaceAll("_", " "), tr);
    html("td", "why", worded(value), tr);
  }
}
const STATES = { empty: "waiting", running: "running", silent: "silent", finished: "finished", stopped: "stopped", failed: "failed", preempted: "preempted" };
function top_() {
  const n = data.newest, f = data.facts;
  $("name").textContent = data.name;
  document.title = `${data.name} · ${lost ? "not connected" : STATES[data.state]}`;
  $("state").className = "pill " + (lost ? "lost" : data.state);
  $("state").textContent = lost ? "not connected" : STATES[data.state];
  const parts = [];
  if (real(n.step)) parts.push(`step ${grouped(n.step)}${n.total_steps ? " of " + grouped(n.total_steps) : ""}`);
  if (real(n.epoch)) parts.push(`epoch ${n.epoch}`);
  if (data.state === "running" && real(n.eta_seconds)) parts.push(`${duration(n.eta_seconds)} left`);
  if (f.strategy) parts.push(`${grouped(data.num_ranks)} × ${String(f.device).split(":")[0]}`, f.strategy, f.precision === "no" ? "fp32" : f.precision);
  $("facts").textContent = parts.join("  ·  ");
  noted($("note"), data);
  $("progress").hidden = !(n.total_steps > 0);
  if (n.total_steps > 0) $("progress").firstElementChild.style.width = Math.min(100, 100 * n.step / n.total_steps) + "%";
  const b = $("banner");
  b.className = "banner";
  if (lost) { b.hidden = false; b.className = "banner warn"; b.textContent = "The monitor doesn't answer: it was ended, or this machine can't reach it. The page shows what it knew last, and goes on as soon as it answers."; }
  else if (data.why) {
    const lasted = data.seen > data.began ? ` in ${duration(data.seen - data.began)}` : "", text = data.why[0].toUpperCase() + data.why.slice(1);
    b.hidden = false; b.textContent = data.state === "finished" ? text + lasted : text;
    if (data.state === "finished") b.className = "banner good";
    if (data.state === "preempted") b.className = "banner warn";
  }
  else if (data.state === "silent") { b.hidden = false; b.className = "banner warn"; b.textContent = "No rank has written anything for more than a minute, and none has said that it ended: a long evaluation, a hang, or a kill."; }
  else b.hidden = true;
}
const HOURS = [["step", "steps", "blue"], ["data_wait", "waiting for data", "orange"], ["evaluation", "evaluation", "teal"], ["save", "saving", "purple"], ["start_up", "start-up", "amber"], ["compile", "compiling", "olive"], ["lost", "repeated steps", "red"], ["hang", "hanging", "pink"], ["idle", "downtime", "faint"], ["shutdown", "shutdown", "soft"]];
function hours() {  // where the time of all starts went
  const box = $("ledger"), h = data.hours;
  box.hidden = !h || !(h.wall_seconds > 0);
  if (box.hidden) return;
  box.className = "card hours";
  box.replaceChildren();
  const head = html("div", "head", null, box), whole = html("div", "whole", null, box), legend = html("div", "legend", null, box);
  html("h2", "", `Goodput ${(100 * h.goodput).toFixed(1)} %`, head);
  html("span", "legend", `${duration(h.wall_seconds)}, ${grouped(h.starts)} start${h.starts === 1 ? "" : "s"}${h.lost_updates ? `, ${grouped(h.lost_updates)} updates done again` : ""}`, head);
  for (const [kind, words, tone] of HOURS) {
    const share = 100 * (h.seconds[kind] || 0) / h.wall_seconds;
    if (share < 0.05) continue;
    const part = html("i", "", null, whole), label = html("span", "", null, legend);
    part.style.width = share + "%";
    part.title = `${words}: ${duration(h.seconds[kind])}`;
    part.style.background = html("i", "area", null, label).style.background = color(tone);
    label.append(`${words} ${share.toFixed(1)} %`);
  }
}
function show() {
  $("several").hidden = view.kind === "run"; $("single").hidden = view.kind !== "run";
  $("back").hidden = folder.is_one || view.kind === "list";
  for (const id of ["csv", "html"]) $(id).hidden = view.kind !== "run";
  $("edit").hidden = view.kind !== "run" || !folder.is_editable;
  for (const id of ["smoothing", "by", "log", "png"]) $(id).hidden = view.kind === "list";
  $("unzoom").hidden = !zoom;
  if (view.kind === "list") return showList();
  if (view.kind === "compare") return showComparison();
  if (!data) return;
  const empty = data.state === "empty";
  $("axis").querySelector('[value="epoch"]').disabled = !hasEpochs(data);
  top_();
  $("empty").hidden = !empty; $("full").hidden = empty;
  $("where").textContent = data.folder;
  if (!empty) { tiles(); hours(); plots(); ranks(); list(); facts(); }
  $("footer").textContent = `${data.folder}  ·  accelerate monitor${STILL ? "  ·  as of " + new Date(1000 * data.now).toLocaleString("en-GB") : ""}`;
}

// ------------------------------------------------------------------------------------------- theme, saving, news
const query = new URLSearchParams(location.search);
function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
}
function remembered(key) { try { return localStorage.getItem(key); } catch { return null; } }
function remember(key, value) { try { localStorage.setItem(key, value); } catch { /* private window */ } }
theme(query.get("theme") || remembered("theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
$("theme").onclick = () => { const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; theme(next); remember("theme", next); };
$("log").onclick = e => { e.target.setAttribute("aria-pressed", e.target.getAttribute("aria-pressed") !== "true"); show(); };
$("smooth").oninput = show;
$("axis").onchange = e => { axis = e.target.value; zoom = null; show(); };
$("unzoom").onclick = () => { zoom = null; show(); };
let resized; addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(show, 80); });

function save(blob, ending) {
  const a = document.createElement("a");
  a.href = URL.createObjectURL(blob); a.download = `${view.kind === "run" ? data.name : "runs"}.${ending}`; a.click();
  setTimeout(() => URL.revokeObjectURL(a.href), 5000);
}
$("html").onclick = () => {
  const text = JSON.stringify(data).replace(/</g, "\\u003c").replace(/\u2028/g, "\\u2028").replace(/\u2029/g, "\\u2029");
  fetch(location.href.split("?")[0]).then(r => r.text()).then(t => save(new Blob([STILL ? t : t.replace("/*DATA*/null/*DATA*/", () => text)], { type: "text/html" }), "html"))
    .catch(() => save(new Blob(["<!doctype html>" + document.documentElement.outerHTML], { type: "text/html" }), "html"));
};
$("png").onclick = () => {  // the charts as one picture, drawn again without the page around them
  const columns = 2, pad = 28, style = getComputedStyle(document.documentElement), colors = text => text.replace(/var\(--([a-z-]+)\)/g, (_, n) => style.getPropertyValue("--" + n).trim());
  const cards = [...charts.values()].filter(c => c.scale), W = Math.max(...cards.map(c => c.scale.W)) , rowsOf = [];
  for (let i = 0; i < cards.length; i += columns) rowsOf.push(cards.slice(i, i + columns));
  let y = 92, body = "";
  const escape = t => t.replace(/&/g, "&amp;").replace(/</g, "&lt;");
  for (const row of rowsOf) {
    row.forEach((c, i) => body += `<g transform="translate(${pad + i * (W + pad)} ${y})"><text x="0" y="0" font-size="15" font-weight="600" fill="var(--ink)">${escape(c.title.textContent)}</text><g transform="translate(0 12)">${new XMLSerializer().serializeToString(c.svg).replace(/^<svg[^>]*>|<\/svg>$/g, "")}</g></g>`);
    y += Math.max(...row.map(c => c.scale.H)) + 50;
  }
  const width = columns * (W + pad) + pad, text = colors(`<svg xmlns="${NS}" width="${width}" height="${y}" font-family="system-ui, sans-serif"><rect width="100%" height="100%" fill="var(--card)"/><text x="${pad}" y="40" font-size="24" font-weight="650" fill="var(--ink)">${escape($("name").textContent)}</text><text x="${pad}" y="62" font-size="13" fill="var(--soft)">${escape($("facts").textContent)}</text>${body}</svg>`);
  const image = new Image();
  image.onload = () => { const canvas = document.createElement("canvas"); canvas.width = 2 * width; canvas.height = 2 * y; const g = canvas.getContext("2d"); g.scale(2, 2); g.drawImage(image, 0, 0); canvas.toBlob(b => save(b, "png")); };
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
};
