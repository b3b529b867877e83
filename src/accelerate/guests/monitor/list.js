// ------------------------------------------------------------------------------------------ the runs of a folder
let sorting = { key: "", down: false }, listedColumns = [];
const FIXED = [
  { key: "state", title: "State", value: r => STATES[r.state], usual: true },
  { key: "step", title: "Last step", value: r => r.step, text: grouped, usual: true },
  { key: "duration", title: "Duration", value: r => r.seen - r.began, text: duration, usual: true },
  { key: "tags", title: "Tags", value: r => r.tags.join(", "), usual: runs => new Set(runs.map(r => r.tags.join())).size > 1 },
  { key: "note", title: "Note", value: r => r.note, usual: runs => runs.some(r => r.note) },
  { key: "why", title: "How it ended", value: r => r.why === "finished" ? "" : r.why, usual: runs => runs.some(r => !["", "finished"].includes(r.why)) },
  { key: "began", title: "Began", value: r => r.began || null, text: v => new Date(1000 * v).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }), usual: runs => runs.length < 12 },
  { key: "ranks", title: "Ranks", value: r => r.num_ranks, text: grouped, usual: runs => new Set(runs.map(r => r.num_ranks)).size > 1 },
];
const isKnown = v => v !== undefined && v !== null && v !== "";
const simple = v => typeof v === "object" && v !== null ? JSON.stringify(v) : v;
const LOST = ["nan", "inf", "-inf"];
const slug = name => name.toLowerCase().replaceAll(/\s+/g, "_");
const named = run => (folder.runs.find(r => r.run === run) || { name: run }).name;

function columnsOf(runs) {  // state, the settings that differ, the results, and what is left
  const names = kind => [...new Set(runs.flatMap(r => Object.keys(r[kind])))];
  const settings = names("settings").map(name => ({ key: "setting " + name, name, kind: "setting", title: name.replaceAll("_", " "), value: r => simple(r.settings[name]), text: worded }));
  for (const c of settings) {  // a text of its own in each run is its name or its folder
    const known = runs.map(c.value).filter(isKnown);
    c.usual = 2 * known.length >= runs.length && !(known.every(v => typeof v === "string") && known.length > 3 && new Set(known).size === known.length);
  }
  for (const c of settings.filter(c => c.usual).slice(8)) c.usual = false;
  const measures = new Map(MEASURES.map(each => [each[0], each])), own = names("numbers").filter(name => !measures.has(name)).sort();
  const numbers = ["loss", ...own, ...[...measures.keys()].slice(1)].filter(name => runs.some(r => name in r.numbers)).map((name, i) => {
    const [, title, format] = measures.get(name) || [name, name, "plain"];
    return { key: "number " + name, name, kind: "number", title, value: r => r.numbers[name], text: FORMATS[format], usual: i < 6 && (i === 0 || own.includes(name)) };
  });
  const wanted = JSON.parse(remembered("columns") || "{}");
  return [FIXED[0], ...settings, ...numbers, ...FIXED.slice(1)].map(c => ({
    ...c, shown: wanted[c.key] ?? (typeof c.usual === "function" ? c.usual(runs) : c.usual),
    isText: runs.some(r => typeof c.value(r) === "string" && !LOST.includes(c.value(r))),
  }));
}

// Words, which all must occur in a run's texts, and comparisons such as `loss < 2` or `optimizer = adam`.
const COMPARISON = /([^\s<>=!]+)\s*(<=|>=|!=|<|>|==?)\s*("[^"]*"|[^\s<>=!]+)/g;
const find = name => listedColumns.find(c => [c.key, c.name, c.title].some(known => known && slug(known) === slug(name)));
function compares(value, sign, wanted) {
  const number = Number(wanted);
  if (real(value) && wanted !== "" && real(number)) return { "<": value < number, ">": value > number, "<=": value <= number, ">=": value >= number, "!=": value !== number }[sign] ?? value === number;
  const same = isKnown(value) && String(value).toLowerCase() === wanted.toLowerCase();
  return sign === "!=" ? !same : sign.startsWith("=") && same;
}
function filtered(runs) {  // [the runs that pass, the names that no column has]
  const text = $("filter").value.replace(/\S+\s*[<>=!]+\s*$/, ""), terms = [...text.matchAll(COMPARISON)].map(([, name, sign, value]) => [find(name), sign, value.replaceAll('"', ""), name]);
  const words = text.replaceAll(COMPARISON, " ").toLowerCase().split(/\s+/).filter(word => word && !["and", "&", "&&"].includes(word));
  const passes = r => terms.every(([column, sign, value]) => column && compares(column.value(r), sign, value))
    && (text => words.every(word => text.includes(word)))([r.run, r.name, r.note, STATES[r.state], r.why, ...r.tags, ...Object.values(r.settings)].join(" ").toLowerCase());
  return [runs.filter(passes), terms.filter(([column]) => !column).map(term => term[3])];
}
function sorted(runs) {  // runs without the value stand last, in either direction
  const column = listedColumns.find(c => c.key === sorting.key) || (sorting.key === "name" ? { value: r => r.name } : null);
  if (!column) return runs;
  const unknown = v => !isKnown(v) || LOST.includes(v);
  return [...runs].sort((a, b) => {
    const [x, y] = [column.value(a), column.value(b)];
    if (unknown(x) || unknown(y)) return unknown(x) - unknown(y);
    return (real(x) && real(y) ? x - y : String(x).localeCompare(String(y), "en", { numeric: true })) * (sorting.down ? -1 : 1);
  });
}

function showList() {
  head(folder.folder.split("/").pop(), `${grouped(folder.num_found)} runs`);
  $("chooser").hidden = false; $("comparison").hidden = true;
  listedColumns = columnsOf(folder.runs);
  const [runs, unknown] = filtered(folder.runs), shown = listedColumns.filter(c => c.shown);
  $("found").textContent = unknown.length ? `no column is called ${unknown.join(", ")}` : runs.length < folder.runs.length ? `${runs.length} of ${folder.runs.length}` : "";
  $("filter").ariaInvalid = String(unknown.length > 0);
  showSweep(runs, shown);
  showColumns();
  const top = html("thead"), body = html("tbody"), titles = html("tr", "", null, top), held = document.activeElement.ariaLabel;
  for (const c of [{ key: "name", title: "Run" }, ...shown]) {
    const th = html("th", c.isText ? "text" : "", null, titles), isSorted = sorting.key === c.key, button = html("button", "", c.title, th);
    th.ariaSort = isSorted ? (sorting.down ? "descending" : "ascending") : "none";
    button.ariaLabel = "sort by " + c.title;
    button.onclick = () => { sorting = !isSorted ? { key: c.key, down: false } : sorting.down ? { key: "", down: false } : { key: c.key, down: true }; show(); };
  }
  for (const r of sorted(runs)) {
    const tr = html("tr", "", null, body), first = html("td", "", null, tr), line = html("div", "run", null, first), box = html("input", "", null, line);
    box.type = "checkbox"; box.checked = chosen.has(r.run); box.ariaLabel = "compare " + r.run;
    box.onchange = () => { chosen[box.checked ? "add" : "delete"](r.run); chooser(); };
    const link = html("a", "", r.name, line);
    link.href = "#run=" + encodeURIComponent(r.run); link.title = r.run;
    if (folder.is_editable) { const pen = html("button", "pen", "✎", line); pen.ariaLabel = `name, tags and note of ${r.run}`; pen.onclick = () => edit(r.run, r); }
    for (const c of shown) {
      const value = c.value(r), td = html("td", c.isText ? "text" : "", null, tr);
      if (c.key === "state") html("span", "pill " + r.state, value, td);
      else if (c.key === "tags") for (const tag of r.tags) html("span", "tag", tag, td);
      else td.textContent = !isKnown(value) ? "–" : c.text ? c.text(value) : value;
      if (c.isText) td.title = td.textContent;
    }
  }
  $("runs").replaceChildren(top, body);
  if (held) [...$("runs").querySelectorAll("[aria-label]")].find(e => e.ariaLabel === held)?.focus({ preventScroll: true });
  chooser();
}
function showColumns() {
  const box = $("columns").lastElementChild, wanted = JSON.parse(remembered("columns") || "{}");
  box.replaceChildren();
  for (const c of listedColumns) {
    const label = html("label", "", null, box), tick = html("input", "", null, label);
    tick.type = "checkbox"; tick.checked = c.shown;
    tick.onchange = () => { remember("columns", JSON.stringify({ ...wanted, [c.key]: tick.checked })); show(); };
    label.append(c.title);
  }
}
function chooser() {
  const known = folder.runs.map(r => r.run).filter(r => chosen.has(r)), most = PALETTE.length;
  $("compare").disabled = known.length < 2 || known.length > most;
  $("compare").textContent = known.length < 2 ? "choose runs to compare" : known.length > most ? `at most ${most} runs` : `compare ${known.length} runs`;
  $("compare").onclick = () => { location.hash = "compare=" + known.map(encodeURIComponent).join(","); };
}
$("filter").oninput = show;

// ------------------------------------------------------------------------------------------ name, tags and note
function noted(box, note) {
  box.replaceChildren(...note.tags.map(tag => html("span", "tag", tag)), note.note);
  box.hidden = !note.tags.length && !note.note;
}
function edit(run, note) {
  const dialog = $("noting"), form = dialog.querySelector("form"), problem = form.querySelector(".banner"), [cancel] = form.querySelectorAll("button");
  form.elements.namedItem("name").value = note.name;
  form.elements.tags.value = note.tags.join(", ");
  form.elements.note.value = note.note;
  problem.hidden = true;
  cancel.onclick = () => dialog.close();
  form.onsubmit = async event => {
    event.preventDefault();
    const tags = form.elements.tags.value.split(",").map(tag => tag.trim()).filter(Boolean);
    const name = form.elements.namedItem("name").value.trim(), isFolder = [run, run.split("/").pop()].includes(name);
    const body = JSON.stringify({ name: isFolder ? "" : name, tags, note: form.elements.note.value });
    const answer = await fetch("note?run=" + encodeURIComponent(run), { method: "POST", headers: { "Content-Type": "application/json" }, body }).catch(() => null);
    if (answer && answer.ok) { dialog.close(); looked = 0; look(); return; }
    problem.hidden = false;
    problem.textContent = answer ? await answer.text() : "The monitor doesn't answer.";
  };
  dialog.showModal();
}
$("edit").onclick = () => edit(view.run, data);
