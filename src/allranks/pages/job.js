// The page of a job. One small object comes every second (/api/events); larger parts are fetched when they are wanted.
(function () {
  const $ = (id) => document.getElementById(id);
  const names = new Intl.Collator("en", { numeric: true }), digits = new Intl.NumberFormat("en");
  const WORDS = { asking: "waiting for a quorum", unreachable: "cannot be reached", cooling: "in back-off", expected: "expected back" };
  const TROUBLE = ["lost", "evicted", "cooling", "unreachable", "expected"];
  let view = null, layout = -1, laid = -1e9, token = "", wanted = null, seen = "";
  const opened = new Set(), shut = new Set(), fetched = new Map();
  function text(node, value) { if (node.textContent !== value) node.textContent = value; return node; }
  function make(tag, value, name) { const node = document.createElement(tag); if (value) node.textContent = value; if (name) node.className = name; return node; }
  // flags and short `commands` stay on one line
  function say(node, value) {
    const parts = (value || "").split(/(`[^`]{1,36}`|(?:\ballranks (?:\w+ )?)?(?<![\w-])--?[a-z][\w-]*)/);
    if (node.dataset.said !== value) node.replaceChildren(...parts.map((one, i) => i % 2 ? make(one[0] === "`" ? "code" : "span", one.replaceAll("`", ""), "whole") : one));
    node.dataset.said = value || "";
    return node;
  }
  function age(s) { return s < 10 ? s.toFixed(1) + " s" : s < 120 ? Math.round(s) + " s" : s < 7200 ? Math.floor(s / 60) + " min " + Math.round(s % 60) + " s" : Math.floor(s / 3600) + " h " + Math.round(s % 3600 / 60) + " min"; }
  function clock(at) { return new Date(at * 1000).toLocaleTimeString("en-GB"); }
  function count(n, word) { return `${digits.format(n)} ${word}${n === 1 ? "" : "s"}`; }
  async function read(path) { const answer = await fetch(path), found = await answer.json(); if (!answer.ok) throw found.error; return found; }

  function show(v) {
    view = v;
    text($("job"), v.job || "job without a name");
    say($("sentence"), v.line.text);
    if (document.title !== v.line.text) document.title = v.line.text;
    $("now").className = "now " + v.line.level;
    $("now").dataset.state = v.line.state;
    numbers(v);
    Ranks.show(v.cells, v.guilty, v.cell);
    text($("grid-title"), v.cell === "rank" ? "Ranks" : "Replicas");
    $("which").placeholder = v.cell;
    $("grid-part").hidden = !v.cells;
    Charts.push(v.sample, v.incidents.filter((i) => i.kind !== "request"));
    incidents(v); replicas(v); log(v); goodput(v);
    if (v.layout !== layout && performance.now() - laid > 5000) place();
    text($("act"), v.numbers.replicas ? "Evict…" : "Restart…");
    $("act").hidden = v.line.state === "finished";
    text($("where"), `lighthouse ${v.address}${v.numbers.quorum ? `, quorum ${v.numbers.quorum} (${v.reason})` : ""}`);
  }
  function numbers(v) {
    const n = v.numbers, open = v.incidents.filter((i) => !i.closed && i.kind !== "request").length;
    const s = v.sample, facts = [];
    if (s.loss !== null && s.loss !== undefined) facts.push(`loss ${+s.loss.toPrecision(4)}`);
    if (v.cell === "rank" && n.ranks) facts.push(`${count(n.ranks, "rank")}${n.nodes ? " on " + count(n.nodes, "node") : ""}`);
    facts.push(v.incidents.length ? `${count(v.incidents.length, "incident")}${open ? `, ${open} open` : ""}` : "no incident", `up ${age(n.up_s)}`);
    text($("numbers"), facts.join(" · "));
  }
  async function place() {
    laid = performance.now();
    const found = await read("/api/nodes");
    layout = found.version;
    Ranks.place(found);
    gpus(found.nodes);
  }
  function gpus(nodes) {
    const rows = nodes.filter((n) => n.gpus.length), box = $("gpus"), key = JSON.stringify(rows.map((n) => [n.node, n.gpus]));
    box.hidden = !rows.length;
    if (!rows.length || box.dataset.key === key) return;
    box.dataset.key = key;
    const mean = (list, pick) => { const known = list.map(pick).filter((x) => x >= 0); return known.length ? known.reduce((a, b) => a + b, 0) / known.length : -1; };
    const line = (name, list) => {
      const busy = mean(list, (g) => g.busy), hot = Math.max(...list.map((g) => g.celsius)), used = mean(list, (g) => g.used_mb), total = mean(list, (g) => g.total_mb), watts = list.reduce((a, g) => a + Math.max(0, g.watts), 0);
      const facts = [count(list.length, "GPU"), busy >= 0 && `${busy.toFixed(0)} % busy`, used >= 0 && `${(used / 1000).toFixed(0)} of ${(total / 1000).toFixed(0)} GB`, hot >= 0 && `${hot} °C`, watts && (watts >= 10000 ? `${digits.format(Math.round(watts / 1000))} kW` : `${digits.format(watts)} W`)];
      return make("p", `${name}: ${facts.filter(Boolean).join(", ")}`, "soft");
    };
    const each = make("details", "", "small");
    each.append(make("summary", `${count(rows.length, "node")}`), ...rows.slice(0, 500).map((n) => line(n.node, n.gpus)));
    box.replaceChildren(make("h3", "GPUs"), ...(rows.length > 1 ? [line("all nodes", rows.flatMap((n) => n.gpus)), each] : rows.map((n) => line(n.node, n.gpus))));
  }

  // ---- incidents: one line each; open ones are unfolded, with stacks
  function incidents(v) {
    const key = JSON.stringify(v.incidents.map((i) => [i.id, i.sentence, i.outcome, i.closed, i.evidence, i.story])), box = $("incidents");
    $("incident-part").hidden = !v.incidents.length;
    if (box.dataset.key === key) return;
    box.dataset.key = key;
    fetched.clear();
    box.replaceChildren(...v.incidents.map(incident));
    const asked = v.incidents.find((i) => i.kind === "request");
    if (asked && wanted && asked.at >= wanted - 60 && seen !== asked.id) { seen = asked.id; wanted = null; text($("said"), ""); const line = box.querySelector(`[data-id="${CSS.escape(asked.id)}"]`); if (line) { line.open = true; line.scrollIntoView({ block: "nearest" }); } }
  }
  function incident(i) {
    const box = make("details", "", "incident small"), head = make("summary");
    const level = i.closed ? (i.kind === "request" ? "" : "good") : i.kind === "stall" || i.kind === "slow" ? "warn" : "bad";
    const state = i.kind === "request" ? "stacks" : i.closed ? (i.kind === "stall" ? "ended" : "recovered") : i.kind || "open";
    box.dataset.id = i.id; box.classList.add(level || "plain");
    const cost = i.kind === "request" || !i.took_s ? "" : i.closed ? ` · ${age(i.took_s)}` : "";
    head.append(make("time", new Date(i.at * 1000).toLocaleString("sv-SE"), "soft"), " ", make("span", state, "pill " + level), " ", say(make("span", "", "what"), i.sentence), make("span", cost, "soft"));
    const body = make("div", "", "incident-body");
    if (i.outcome) body.append(say(make("p"), i.outcome));
    const links = make("p", "", "bar");
    if (i.story && i.story.startsWith("/incidents/")) { const link = make("a", "Open the story"); link.href = i.story; links.append(link); } else if (i.path) links.append(make("span", `evidence: ${i.path}${i.node ? " on " + i.node : ""}`, "soft"));
    body.append(links);
    box.append(head, body);
    box.addEventListener("toggle", () => {
      (box.open ? opened : shut).add(i.id); (box.open ? shut : opened).delete(i.id);
      if (box.open && !body.dataset.loaded && i.evidence && i.evidence.startsWith("/incidents/")) { body.dataset.loaded = "yes"; evidence(i, body); }
    });
    box.open = opened.has(i.id) || (!i.closed && !shut.has(i.id));
    return box;
  }
  async function evidence(i, body) {
    const holder = body.appendChild(make("div", "Loading…", "soft evidence"));
    try {
      if (!fetched.has(i.evidence)) fetched.set(i.evidence, await read(i.evidence));
      const ranks = fetched.get(i.evidence).ranks;
      holder.className = "evidence";
      const advice = (fetched.get(i.evidence).advice || []).map((one) => say(make("p", "", "todo"), "What to do: " + one));
      holder.replaceChildren(...(i.closed ? [] : advice), ...ranks.length ? ranks.map(entry) : [make("p", "No stack or call was recorded.", "soft")]);
      if (fetched.get(i.evidence).timeline && i.story) { const frame = make("iframe", "", "timeline"); frame.title = "Timeline of the calls"; frame.setAttribute("sandbox", "allow-scripts"); frame.loading = "lazy"; frame.src = i.story + "?timeline"; holder.append(frame); }
    } catch (error) { delete body.dataset.loaded; text(holder, "The evidence cannot be read: " + error); }
  }
  // the frame has another origin: it sends its height
  addEventListener("message", (event) => {
    const frame = [...document.querySelectorAll("iframe.timeline")].find((one) => one.contentWindow === event.source);
    if (frame && event.data.height > 0) frame.style.height = Math.min(560, event.data.height + 2) + "px";
  });
  function entry(one) {
    const box = make("details", "", "small panel" + (one.guilty ? " guilty" : ""));
    box.append(make("summary", one.title + (one.cause ? ": " + one.cause : "") + (one.where ? " at " + one.where : "")), ...parts({ ...one, calls: (one.calls || []).slice(-5) }));
    box.open = one.guilty;
    return box;
  }
  function parts(one) {
    const found = [];
    if (one.evidence) found.push(make("p", one.evidence, "soft"));
    const pair = make("div", "", one.source ? "beside" : "");
    if (one.stack && one.stack.length) pair.append(listed("Stack, innermost frame first", one.stack));
    if (one.source) {
      const figure = make("figure", "", "source"), code = make("pre");
      for (const [number, line, hit] of one.source.lines) { const row = make("span", "", hit ? "hit" : ""); row.append(make("i", String(number).padStart(5)), " " + line); code.append(row); }
      figure.append(make("figcaption", one.source.title), code); pair.append(figure);
    }
    if (pair.children.length) found.push(pair);
    if (one.calls && one.calls.length) found.push(listed(`Last calls${one.ranks && one.ranks.length > 1 ? " of rank " + one.ranks[0] : ""}, the newest last`, one.calls));
    if (one.log && one.log.length) { const pre = make("pre", one.log.join("\n"), "text"); found.push(make("h3", "Last lines of its output"), pre); }
    return found;
  }
  function listed(title, lines) { const box = make("div"), list = make("ol", "", "lines"); list.append(...lines.map((line) => make("li", line))); box.append(make("h3", title), list); return box; }

  // ---- one rank
  async function pick(number) {
    if (view.cell !== "rank") { $("replica-part").hidden = false; $("replica-part").open = true; $("filter").value = ""; table(); return; }
    const box = $("drawer-body");
    $("drawer").hidden = false;
    const title = Ranks.name(number);
    box.replaceChildren(make("h2", title), make("p", "Loading…", "soft"));
    try {
      const r = await read("/api/ranks/" + number), facts = [];
      const add = (name, value) => { if (value) { const row = make("div"); row.append(make("dt", name), make("dd", value)); facts.push(row); } };
      add("Does", r.place ? `${r.doing}: ${r.place}` : r.doing); add("Node", r.node); add("Process", r.pid ? String(r.pid) : "");
      add("Step", r.step >= 0 ? digits.format(r.step) : ""); add("Step time", r.step_s ? age(r.step_s) : ""); add("Calls", r.calls ? digits.format(r.calls) : ""); add("Memory", r.memory_mb ? `${(r.memory_mb / 1000).toFixed(1)} GB` : "");
      for (const g of r.gpus || []) add(`GPU ${g.index}`, [g.busy >= 0 && `${g.busy} % busy`, g.used_mb >= 0 && `${(g.used_mb / 1000).toFixed(1)} GB`, g.celsius >= 0 && `${g.celsius} °C`, g.watts >= 0 && `${g.watts} W`].filter(Boolean).join(", "));
      const list = make("dl", "", "facts");
      list.append(...facts);
      box.replaceChildren(make("h2", title), list);
      if (r.evidence) box.append(make("p", `From incident ${r.evidence.incident}:`, "soft"), ...parts(r.evidence));
      else box.append(make("p", "No stack of this rank was taken. “Stacks now” takes those of all ranks.", "soft"));
    } catch (error) { box.replaceChildren(make("h2", title), make("p", String(error), "soft")); }
  }

  // ---- replicas: a summary; the table on demand
  function replicas(v) {
    const states = Object.entries(v.replicas), part = $("replica-part");
    part.hidden = !states.length;
    if (!states.length) return;
    text($("who"), "Replicas: " + states.sort((a, b) => b[1] - a[1]).map(([state, n]) => `${digits.format(n)} ${WORDS[state] || state}${state === "member" && n !== 1 ? "s" : ""}`).join(", "));
    const key = JSON.stringify(v.odd);
    if ($("odd").dataset.key !== key) {
      $("odd").dataset.key = key;
      $("odd").replaceChildren(...v.odd.map((r) => make("p", `${r.replica}: ${WORDS[r.state] || r.state}${r.at ? " since " + clock(r.at) : ""}${r.why ? ", " + r.why : ""}`)));
    }
  }
  let rows = [];
  async function table() {
    const s = await read("/api/status");
    const gone = s.departed.map((d) => ({ replica: d.replica, state: d.kind, node: "", ranks: 0, step: d.step, health: d.reason })), here = new Set(s.replicas.map((r) => r.replica));
    rows = [...s.replicas.filter((r) => r.state !== "observer"), ...gone.filter((d) => !here.has(d.replica))].sort((a, b) => TROUBLE.includes(b.state) - TROUBLE.includes(a.state) || names.compare(a.replica, b.replica));
    draw();
  }
  function draw() {
    const want = $("filter").value.trim().toLowerCase(), found = rows.filter((r) => `${r.replica} ${r.node} ${r.state}`.toLowerCase().includes(want)), listed = found.slice(0, 200);
    text($("shown"), found.length > listed.length ? `${digits.format(listed.length)} of ${digits.format(found.length)}` : "");
    const heads = ["Replica", "State", "Node", "Ranks", "Step", "Note"];
    $("rows").replaceChildren(...listed.map((r) => { const row = make("tr", "", TROUBLE.includes(r.state) ? "bad" : ""); [r.replica, WORDS[r.state] || r.state, r.node, r.ranks ? String(r.ranks) : "", r.step >= 0 ? digits.format(r.step) : "", r.health].forEach((value, k) => { const cell = make("td", value); cell.dataset.label = heads[k]; row.append(cell); }); return row; }));
  }
  function log(v) {
    const key = v.events.length + ":" + (v.events.length ? v.events[v.events.length - 1].at : 0), box = $("log");
    $("log-part").hidden = !v.events.length;
    if (box.dataset.key === key) return;
    box.dataset.key = key;
    box.replaceChildren(...v.events.slice().reverse().map((e) => { const item = make("li", "", ["lost", "evicted", "incident"].includes(e.kind) ? "bad" : ""); item.append(make("time", clock(e.at)), e.text); return item; }));
  }
  function goodput(v) {
    const parts = Object.entries(v.goodput || {}).filter(([, s]) => s > 0), total = parts.reduce((a, [, s]) => a + s, 0);
    $("goodput-part").hidden = !total;
    if (!total) return;
    $("goodput").replaceChildren(...parts.map(([name, s]) => { const bar = make("div", "", "spent " + name); bar.style.width = 100 * s / total + "%"; bar.title = `${name}: ${age(s)}`; return bar; }));
    text($("goodput-text"), parts.filter(([, s]) => s >= 0.0005 * total).map(([name, s]) => `${name.replaceAll("_", " ")} ${(100 * s / total).toFixed(1)} %`).join(" · "));
  }

  // ---- actions: the dialog asks for the token and says where it is
  let action = null;
  function ask(title, words, path, replicas) {
    action = { path, replicas };
    text($("ask"), title); text($("ask-text"), words); text($("said"), "");
    $("ask-which").hidden = !replicas;
    if (replicas) $("replica").replaceChildren(...replicas.map(([verb, name]) => new Option(verb === "evict" ? name : `${name} (readmit)`, `${encodeURIComponent(name)}/${verb}`)));
    text($("token-place"), view.token_file ? `The token is in ${view.token_file}.` : "The lighthouse printed where the token is when it started.");
    $("token").value = token;
    $("dialog").showModal();
  }
  async function act() {
    const said = $("said"), local = ["localhost", "[::1]"].includes(location.hostname) || /^127\./.test(location.hostname);
    said.className = "bad";
    if (location.protocol !== "https:" && !local) { text(said, "This page is not encrypted, so the token is not sent. Use TLS, an ssh tunnel, or `allranks lighthouse`."); return; }
    token = $("token").value;
    const path = action.replicas ? "/api/replicas/" + $("replica").value : action.path;
    try {
      const answer = await fetch(path, { method: "POST", headers: { Authorization: "Bearer " + token, "Content-Type": "application/json" }, body: JSON.stringify({ reason: "by hand, on the page" }) });
      const found = await answer.json();
      if (!answer.ok) { text(said, found.error); return; }
      if (action.path === "/api/collect") { wanted = view.now; text($("live"), "collecting stacks…"); }
      $("dialog").close();
    } catch (error) { text(said, String(error)); }
  }
  $("stacks").addEventListener("click", () => ask("Stacks of all ranks", "Each agent reads the stacks of its ranks and copies their black boxes. Training continues. They appear below in a few seconds.", "/api/collect", null));
  $("act").addEventListener("click", async () => {
    if (!view.numbers.replicas) { ask("Restart the job", "All ranks are ended now. The launcher starts them again if it has restarts left (--max-restarts).", "/api/restart", null); return; }
    await table();
    ask("Evict or readmit a replica", "The others continue without one that is evicted. Its agent starts it again.", "", rows.filter((r) => !["lost", "left", "finished"].includes(r.state) || r.state === "evicted").map((r) => [["evicted", "cooling"].includes(r.state) ? "readmit" : "evict", r.replica]));
  });
  $("do").addEventListener("click", act);
  $("dialog").addEventListener("submit", (event) => { if (event.submitter === null || document.activeElement === $("token")) { event.preventDefault(); act(); } });
  $("close").addEventListener("click", () => { $("drawer").hidden = true; });
  addEventListener("keydown", (event) => { if (event.key === "Escape") $("drawer").hidden = true; });
  $("which").addEventListener("change", (event) => { if (/^\d+$/.test(event.target.value)) pick(Number(event.target.value)); });
  $("filter").addEventListener("input", draw);
  $("replica-part").addEventListener("toggle", () => { if ($("replica-part").open) table(); });
  $("unzoom").addEventListener("click", () => Charts.unzoom());
  $("ranges").addEventListener("click", (event) => {
    const button = event.target.closest("button[data-span]");
    if (!button) return;
    for (const each of $("ranges").children) each.setAttribute("aria-pressed", String(each === button));
    Charts.load(Number(button.dataset.span));
  });
  async function jobs() {
    const found = (await read("/api/jobs")).filter((j) => !j.here && !j.ended && /^[\w.\-:\[\]]+$/.test(j.address || "")), box = $("jobs");
    const levels = ["bad", "warn", "good"], level = (j) => levels.indexOf(j.level), dot = (j) => make("i", "", "dot " + (levels[level(j)] || ""));
    const key = JSON.stringify(found.map((j) => [j.job, j.address, j.level]));
    box.hidden = !found.length;
    if (box.dataset.key === key || !found.length) return;
    box.dataset.key = key;
    found.sort((a, b) => level(a) - level(b) || names.compare(a.job, b.job));
    const head = make("summary"), list = make("div", "", "others"), all = make("details");
    head.append(dot(found[0]), `${count(found.length, "other job")}`);
    list.append(...found.map((j) => { const link = make("a", j.job), one = make("div", "", "job"); link.href = "http://" + j.address + "/"; link.title = j.text; one.append(dot(j), link); return one; }));
    all.append(head, list); all.open = box.firstChild?.open || false;
    box.replaceChildren(all);
  }

  // ---- the stream; without it the first line says so, for what it said before may no longer be true
  const QUIET_S = 8;
  let heard = 0;
  function connection(on, words) { text($("live"), words); $("live").className = "pill " + (on ? "good" : "bad"); }
  function check(lost) {
    const quiet = (performance.now() - heard) / 1000;
    if (!lost && (!heard || quiet < QUIET_S)) return;
    connection(false, lost ? "connection lost, trying again" : "no news");
    $("now").className = "now warn";
    const last = view ? ` Last known: ${view.line.text}` : "";
    say($("sentence"), `No news from the lighthouse${heard ? ` for ${age(quiet)}` : ""}.${last}`);
    document.title = "No news: " + (view ? view.job || "job" : "job");
  }
  Charts.start($("charts")); Ranks.start(pick);
  Charts.load(900).finally(() => {
    const source = new EventSource("/api/events");
    source.onmessage = (event) => { heard = performance.now(); show(JSON.parse(event.data)); connection(true, wanted ? "collecting stacks…" : "live"); document.body.dataset.ready = "yes"; };
    source.onerror = () => check(true);
    setInterval(() => check(source.readyState !== EventSource.OPEN), 1000);
    jobs(); setInterval(jobs, 15000);
  });
})();
