// -------------------------------------------------------------------------------------- what is seen; comparison
// view: {kind: "list"}, {kind: "run", run} or {kind: "compare", runs}; the address after # says which.
let folder = { is_one: true, runs: [] }, view = { kind: "run", run: "" }, compared = new Map();
const chosen = new Set();
const MEASURES = [
  ["loss", "Loss", "plain", "w12"], ["samples_per_second", "Throughput (samples/s)", "rate", "w6"], ["tokens_per_second", "Throughput (tokens/s)", "rate", "w6"],
  ["step_seconds", "Step time", "seconds", "w6"], ["learning_rate", "Learning rate", "scientific", "w6"], ["gradient_norm", "Gradient norm", "plain", "w6"], ["memory_bytes", "Memory of rank 0", "bytes", "w6"],
  ["wait_seconds", "Waiting for data", "seconds", "w6"], ["mfu", "MFU", "share", "w6"], ["device_utilization", "Device busy", "share", "w6"],
];

function viewed() {
  const [kind, names] = location.hash.slice(1).split("=");
  const runs = (names || "").split(",").filter(Boolean).map(decodeURIComponent);
  if (STILL || folder.is_one) return { kind: "run", run: "" };
  if (kind === "run" && runs.length) return { kind, run: runs[0] };
  if (kind === "compare" && runs.length) return { kind, runs };
  return { kind: "list" };
}
function head(name, text) {
  $("name").textContent = name;
  document.title = `${name} · ${lost ? "not connected" : "runs"}`;
  $("state").className = "pill" + (lost ? " lost" : "");
  $("state").textContent = lost ? "not connected" : text;
  $("facts").textContent = folder.folder === name ? "" : folder.folder;
  $("progress").hidden = $("note").hidden = true;
  $("banner").hidden = !lost;
  if (lost) { $("banner").className = "banner warn"; $("banner").textContent = "The monitor doesn't answer; the page shows what it knew last."; }
  $("footer").textContent = `${folder.folder}  ·  accelerate monitor`;
}
function showComparison() {
  head(view.runs.map(named).join(" · "), `${view.runs.length} runs`);
  $("chooser").hidden = true; $("comparison").hidden = false;
  const docs = view.runs.map(run => [run, compared.get(run)]).filter(([, doc]) => doc && doc.state !== "empty");
  if (!docs.length) return;
  data = docs[0][1];
  $("axis").querySelector('[value="epoch"]').disabled = !docs.every(([, doc]) => hasEpochs(doc));
  drawn = [];
  const weight = +$("smooth").value, log = $("log").getAttribute("aria-pressed") === "true";
  const own = [...new Set(docs.flatMap(([, doc]) => Object.keys(doc.own)))].sort().map(name => [name, name, "plain", "w6"]);
  const [loss, ...others] = MEASURES.map(each => [...each]), measured = [loss, ...own, ...others].filter(([name]) => docs.some(([, doc]) => doc.curves[name] || doc.own[name]));
  const halves = measured.filter(each => each[3] === "w6");
  if (halves.length % 2) halves.at(-1)[3] = "w12";  // the last row is filled
  for (const [name, title, format, width] of measured) {
    const series = docs.flatMap(([run, doc], i) => {
      const c = doc.curves[name] || doc.own[name];
      return c ? lines(doc.name, PALETTE[i], c, weight, { doc }).map(line => line.faint ? line : { ...line, name: named(run) }) : [];
    });
    if (series.length) draw("compared " + name, width, { title, series, format, log: log && name === "loss", robust: true, zero: name !== "loss" && format !== "plain", height: name === "loss" ? 300 : 190 });
  }
  settle();
  differences(docs);
}
function differences(docs) {
  const table = $("differences");
  table.replaceChildren();
  const titles = html("tr", "", null, table);
  html("th", "", "", titles);
  for (const [run, doc] of docs) { const th = html("th", "", null, titles), link = html("a", "", named(run), th); link.href = "#run=" + encodeURIComponent(run); }
  const row = (name, values) => { const tr = html("tr", "", null, table); html("td", "", name, tr); for (const v of values) html("td", "why", v, tr); };
  row("State", docs.map(([, doc]) => STATES[doc.state]));
  row("How it ended", docs.map(([, doc]) => doc.why || "–"));
  row("Duration", docs.map(([, doc]) => duration(doc.seen - doc.began)));
  row("Last step", docs.map(([, doc]) => grouped(doc.newest.step)));
  row("Last loss", docs.map(([, doc]) => plain(doc.newest.loss)));
  row("Lowest loss", docs.map(([, doc]) => { const known = ((doc.curves.loss || {}).values || []).filter(real); return known.length ? plain(Math.min(...known)) : "–"; }));
  const names = [...new Set(docs.flatMap(([, doc]) => Object.keys(doc.settings)))].filter(name => name !== "command");  // its arguments are listed
  for (const name of names) {
    const values = docs.map(([, doc]) => worded(doc.settings[name]));
    if (new Set(values).size > 1) row(name.replaceAll("_", " "), values);
  }
}

// ------------------------------------------------------------------------------------------------- what is new
$("csv").onclick = async () => {
  const answer = STILL ? null : await fetch("csv?run=" + encodeURIComponent(view.run)).catch(() => null);
  save(new Blob([answer && answer.ok ? await answer.text() : asTable(data)], { type: "text/csv" }), "csv");
};
function asTable(doc) {  // of a page that was saved: the points that it shows
  const columns = Object.entries({ time: { steps: doc.clock.steps, values: doc.clock.times }, ...doc.curves, ...doc.own }).map(([name, c]) => [name, new Map(c.steps.map((s, i) => [s, c.values[i]]))]);
  const steps = [...new Set(columns.flatMap(([, c]) => [...c.keys()]))].sort((a, b) => a - b), cell = v => v === undefined || v === null ? "" : v;
  const quoted = name => /[",\n]/.test(name) ? `"${name.replaceAll('"', '""')}"` : name;
  return [["step", ...columns.map(([name]) => quoted(name))], ...steps.map(s => [s, ...columns.map(([, c]) => cell(c.get(s)))])].map(row => row.join(",")).join("\n") + "\n";
}
async function asked(address) {
  const answer = await fetch(address, { cache: "no-store" });
  if (answer.status !== 200 && answer.status !== 204) throw new Error(answer.status);
  return answer.status === 200 ? answer.json() : null;
}
async function document_(run, known) {
  return asked(`data?run=${encodeURIComponent(run)}` + (known ? "&known=" + encodeURIComponent(known.tag) : ""));
}
let looked = 0, timer = 0;
async function look() {
  clearTimeout(timer);
  try {
    const now = Date.now();
    let isNew = lost;
    if (now - looked > (view.kind === "list" ? 1500 : 5000)) {
      const found = await asked("runs");
      isNew ||= view.kind === "list" && JSON.stringify(found) !== JSON.stringify(folder);
      folder = found; looked = now;
    }
    const before = JSON.stringify(view);
    view = viewed();
    if (JSON.stringify(view) !== before) { data = null; zoom = null; hover = null; compared = new Map(); hideTip(); }
    isNew ||= JSON.stringify(view) !== before;
    if (view.kind === "run") { const found = await document_(view.run, lost ? null : data); if (found) { data = found; isNew = true; } }
    if (view.kind === "compare") for (const run of view.runs) { const found = await document_(run, compared.get(run)); if (found) { compared.set(run, found); isNew = true; } }
    lost = false;
    if (isNew) show();
  } catch { if (!lost) { lost = true; if (data || view.kind !== "run") show(); else { $("state").className = "pill lost"; $("state").textContent = "not connected"; } } }
  timer = setTimeout(look, document.hidden ? 5000 : 1000);
}
addEventListener("hashchange", look);
if (STILL) { data = STILL; if (query.has("still")) document.querySelector(".tools").hidden = true; show(); document.documentElement.dataset.height = Math.ceil(document.body.getBoundingClientRect().height); } else look();
