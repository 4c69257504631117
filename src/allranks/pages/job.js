// The job's page: everything comes as one status over server-sent events and is put on the page as text.
(function () {
  const $ = (id) => document.getElementById(id);
  const MAX_ROWS = 100, STRIP_ROWS = 24, SHOWN_INCIDENTS = 3, RECENT_S = 5;  // heartbeats come every second: a row that is well does not change
  const LEVELS = { member: "good", asking: "good", spare: "", connected: "", finished: "good", running: "good", left: "", lost: "bad", evicted: "bad", cooling: "warn", unreachable: "warn", expected: "warn" };
  const NAMES = { asking: "waiting for quorum", unreachable: "cannot be reached", cooling: "back-off", expected: "expected back" };
  const names = new Intl.Collator("en", { numeric: true }), digits = new Intl.NumberFormat("en");  // made once: a thousand rows use them
  const opened = new Set(), fetched = new Map();  // evidence by its address
  let status = null, all = false, skew = 0;
  function text(node, value) { if (node.textContent !== value) node.textContent = value; return node; }
  function make(tag, value, name) { const node = document.createElement(tag); if (value) node.textContent = value; if (name) node.className = name; return node; }
  function number(n) { return n < 0 ? "–" : digits.format(n); }
  function age(s) { return s < 10 ? s.toFixed(1) + " s" : s < 120 ? Math.round(s) + " s" : s < 7200 ? Math.round(s / 60) + " min" : (s / 3600).toFixed(1) + " h"; }
  function clock(at) { return new Date(at * 1000).toLocaleTimeString("en-GB"); }
  const serverNow = () => Date.now() / 1000 + skew;

  function show(s) {
    status = s;
    const t = s.training, last = s.history.length ? s.history[s.history.length - 1].at : 0;
    skew = Math.max(skew, last - Date.now() / 1000, -1e9);
    text($("job"), s.job || "job without a name");
    text($("sentence"), t.sentence);
    if (document.title !== t.sentence) document.title = t.sentence;
    $("now").className = "now " + t.state;
    const why = s.waiting && !t.sentence.includes(s.waiting) ? "No new quorum: " + s.waiting : "";
    $("why").hidden = !why; text($("why"), why);
    const marks = t.step >= 0 || t.replicas > 0;  // a script without step marks is judged by its calls
    $("pace-part").hidden = !marks;
    cards([...marks ? [["Step", number(t.step)], ["Steps per second", t.steps_per_s === null ? "–" : t.steps_per_s.toFixed(t.steps_per_s < 10 ? 2 : 1)]] : [],
      t.replicas ? ["Replicas", `${t.members} of ${t.replicas}`] : ["Nodes", String(s.replicas.filter((r) => r.replica.startsWith("agent-")).length)],
      [marks ? "Without a step" : "Without a call", t.stalled_s ? age(t.stalled_s) : "–"], ["Incidents", String(s.incidents.length)], ["Up", age(s.up_s)]]);
    rows(s); waits(s); incidents(s); log(s); pace(s); members(s);
    text($("where"), `lighthouse ${s.address}${s.number ? `, quorum ${s.number} (${s.reason})` : ""}, allranks ${s.version}`);
  }
  function cards(facts) {
    const box = $("cards");
    while (box.children.length > facts.length) box.lastChild.remove();
    facts.forEach(([name, value], i) => {
      const card = box.children[i] || box.appendChild(make("div", "", "fact"));
      if (!card.children.length) card.append(make("span", name), make("b"));
      text(card.children[0], name); text(card.children[1], value);
    });
  }

  // ---- replicas: the gone ones stay, those with trouble come first
  function list(s) {
    const here = new Set(s.replicas.filter((r) => r.state !== "observer").map((r) => r.replica));
    const gone = s.departed.filter((d) => !here.has(d.replica)).map((d) => ({ replica: d.replica, state: d.kind, node: "", ranks: 0, step: d.step, gone: d.at, health: d.reason, heard_s: 0 }));
    const departed = new Map(s.departed.map((d) => [d.replica, d]));
    const found = s.replicas.filter((r) => r.state !== "observer").map((r) => {
      const left = departed.get(r.replica);
      return left && ["lost", "left", "evicted"].includes(r.state) ? { ...r, step: Math.max(r.step, left.step), gone: left.at, health: left.reason || r.health } : r.state === "evicted" ? { ...r, health: s.evicted[r.replica] || r.health } : r;
    });
    if (!gone.length && !found.length) return s.replicas.filter((r) => r.replica.startsWith("agent-")).map((r) => ({ ...r, replica: r.node || r.replica, node: "", state: "running", ranks: 0, nodeOnly: true }));
    const order = { lost: 0, evicted: 0, cooling: 1, unreachable: 1, expected: 1, asking: 2 };
    return [...gone, ...found].sort((a, b) => (order[a.state] ?? 3) - (order[b.state] ?? 3) || names.compare(a.replica, b.replica));
  }
  function rows(s) {
    const want = $("filter").value.trim().toLowerCase(), body = $("rows"), every = list(s);
    const found = want ? every.filter((r) => `${r.replica} ${r.node} ${r.state} ${NAMES[r.state] || ""}`.toLowerCase().includes(want)) : every;
    const shown = all ? found : found.slice(0, MAX_ROWS);
    text($("shown"), every.length > shown.length ? `${shown.length.toLocaleString("en")} of ${every.length.toLocaleString("en")}` : every.length ? "" : "none yet");
    $("more").hidden = all || shown.length === found.length;
    while (body.rows.length > shown.length) body.deleteRow(-1);
    const nodes = every.length > 0 && every.every((r) => r.nodeOnly);
    text($("who"), nodes ? "Nodes" : "Replicas");
    $("replicas").className = nodes ? (every.some((r) => r.step >= 0) ? "nodes" : "nodes unmarked") : "";
    $("members-part").hidden = nodes;
    text($("replicas").tHead.rows[0].cells[0], nodes ? "Node" : "Replica");
    const heads = ["Replica", "State", "Node", "Ranks", "Step", "Last heard", "Note", ""];
    shown.forEach((r, i) => {
      let row = body.rows[i];
      if (!row) {
        row = body.insertRow();
        for (const head of heads) row.insertCell().dataset.label = head;
        row.cells[1].append(make("i", "", "dot"), make("span"));
        row.cells[7].append(make("button"));
        row.cells[7].firstChild.type = "button";
      }
      const out = s.evicted[r.replica] !== undefined || r.state === "cooling" || (s.over && r.state === "asking");
      row.className = LEVELS[r.state] === "bad" ? "bad" : "";
      text(row.cells[0], r.replica);
      row.cells[1].firstChild.className = "dot " + (LEVELS[r.state] || "");
      text(row.cells[1].lastChild, NAMES[r.state] || r.state);
      text(row.cells[2], r.node); text(row.cells[3], r.ranks ? String(r.ranks) : ""); text(row.cells[4], number(r.step));
      text(row.cells[5], r.gone ? `${age(Math.max(0, serverNow() - r.gone))} ago` : r.heard_s < RECENT_S ? "just now" : age(r.heard_s) + " ago");
      text(row.cells[6], r.health || "");
      const button = row.cells[7].firstChild;
      button.hidden = r.nodeOnly || ["lost", "left", "finished", "expected"].includes(r.state) && !out;
      text(button, out ? "Readmit" : "Evict");
      button.dataset.replica = r.replica; button.dataset.action = out ? "readmit" : "evict";
    });
  }

  // ---- who waits for whom: what agents see of their nodes, and who has not asked for the next quorum
  function waits(s) {
    const found = s.replicas.filter((r) => r.state === "observer" && r.health).map((r) => `${r.node || r.replica}: ${r.health}`);
    if (s.waiting) found.push(s.waiting);
    $("waits-part").hidden = !found.length;
    const box = $("waits");
    if (box.dataset.key !== found.join("\n")) { box.dataset.key = found.join("\n"); box.replaceChildren(...found.map((words) => make("li", words))); }
  }

  // ---- incidents and history
  function incidents(s) {
    const key = JSON.stringify(s.incidents), box = $("incidents");
    if (box.dataset.key === key) return;
    box.dataset.key = key;
    fetched.clear();
    $("incident-part").hidden = !s.incidents.length;
    const cards = s.incidents.slice(-20).reverse().sort((a, b) => Boolean(a.closed) - Boolean(b.closed)).map((i) => {
      const card = make("div", "", "panel incident " + (i.closed ? "good" : i.kind === "stall" ? "warn" : ""));
      const head = make("p"), time = make("time", new Date(i.at * 1000).toLocaleString("sv-SE"), "soft");  // 2026-11-16 07:02:31
      head.append(time, " ", make("span", i.closed ? "recovered" : i.kind || "open", "pill " + (i.closed ? "good" : "bad")));
      card.append(head, make("p", i.sentence, "what"));
      const facts = [i.cause && i.cause.replaceAll("_", " "), i.outcome, i.node && "on " + i.node].filter(Boolean).join(" · ");
      if (facts) card.append(make("p", facts, "soft"));
      const links = make("p", "", "bar");
      if (i.story && i.story.startsWith("/incidents/")) { const link = make("a", "Open the story"); link.href = i.story; links.append(link); } else if (i.path) links.append(make("span", "evidence: " + i.path, "soft"));
      if (i.evidence && i.evidence.startsWith("/incidents/")) card.append(links, evidence(i.evidence)); else if (links.children.length) card.append(links);
      return card;
    });
    const rest = make("details", "", "small");
    rest.append(make("summary", `${cards.length - SHOWN_INCIDENTS} more`), ...cards.slice(SHOWN_INCIDENTS));
    box.replaceChildren(...cards.slice(0, SHOWN_INCIDENTS), ...cards.length > SHOWN_INCIDENTS ? [rest] : []);
  }
  // stacks and last calls of an incident: fetched when they are opened, and opened again when the list is redrawn
  function evidence(url) {
    const box = make("details", "", "small evidence"), body = make("div", "Loading…", "soft");
    box.append(make("summary", "Stacks and last calls"), body);
    box.addEventListener("toggle", async () => {
      if (box.open) opened.add(url); else opened.delete(url);
      if (!box.open || box.dataset.loaded) return;
      box.dataset.loaded = "yes";
      try {
        if (!fetched.has(url)) { const answer = await fetch(url), found = await answer.json(); if (!answer.ok) throw found.error; fetched.set(url, found); }
        const ranks = fetched.get(url).ranks;
        body.className = "";
        body.replaceChildren(...ranks.length ? ranks.map(ranked) : [make("p", "No stack or call was recorded.", "soft")]);
      } catch (error) { delete box.dataset.loaded; text(body, "The evidence cannot be read: " + error); }
    });
    box.open = opened.has(url);
    return box;
  }
  function ranked(one) {
    const box = make("details", "", "small panel" + (one.guilty ? " guilty" : ""));
    box.append(make("summary", one.title + (one.cause ? ": " + one.cause : "") + (one.where ? " at " + one.where : "")));
    if (one.evidence) box.append(make("p", one.evidence, "soft"));
    for (const [title, lines] of [["Stack, innermost frame first", one.stack], [`Last calls${one.ranks.length > 1 ? " of rank " + one.ranks[0] : ""}, the newest last`, one.calls]]) {
      if (!lines.length) continue;
      const list = make("ol", "", "lines");
      list.append(...lines.map((line) => make("li", line)));
      box.append(make("h3", title), list);
    }
    box.open = one.guilty;
    return box;
  }
  function log(s) {
    const key = s.history.length + ":" + (s.history.length ? s.history[s.history.length - 1].at : 0), box = $("log");
    if (box.dataset.key === key) return;
    box.dataset.key = key;
    box.replaceChildren(...s.history.slice(-200).reverse().map((e) => {
      const item = make("li", "", ["lost", "evicted", "incident", "stalled"].includes(e.kind) ? "bad" : "");
      item.append(make("time", clock(e.at)), e.text);
      return item;
    }));
  }

  // ---- charts
  function pen(canvas) {
    const scale = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) { canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale); }
    const g = canvas.getContext("2d"), css = getComputedStyle(document.documentElement);
    g.setTransform(scale, 0, 0, scale, 0, 0);
    g.clearRect(0, 0, width, height);
    g.font = '12px system-ui, "DejaVu Sans", sans-serif';
    g.textBaseline = "middle";
    return { g, width, height, colour: (name) => css.getPropertyValue(name).trim() };
  }
  function axis({ g, width, height, colour }, left, from, to) {
    g.fillStyle = colour("--soft");
    g.textAlign = "left"; g.fillText(age(Math.max(0, to - from)) + " ago", left, height - 10);
    g.textAlign = "right"; g.fillText("now", width - 8, height - 10);
    g.textAlign = "left";
  }
  function empty(p, words) { p.g.fillStyle = p.colour("--soft"); p.g.fillText(words, 14, p.height / 2); }
  function pace(s) {
    const p = pen($("pace")), { g, width, height, colour } = p, left = 44, top = 14, low = height - 24;
    if (s.pace.length < 2) { empty(p, "Not enough steps yet."); return; }
    const to = Math.max(serverNow(), s.pace[s.pace.length - 1].at), from = Math.min(s.pace[0].at, to - 10), bins = Math.max(20, Math.floor((width - left - 8) / 4));
    const rate = new Float64Array(bins), known = new Float64Array(bins), wide = (to - from) / bins;
    for (let i = 1; i < s.pace.length; i++) {
      const a = s.pace[i - 1], b = s.pace[i], speed = Math.max(0, b.step - a.step) / Math.max(1e-3, b.at - a.at);
      const first = (a.at - from) / wide, last = (b.at - from) / wide;
      for (let k = Math.max(0, Math.floor(first)); k <= Math.min(bins - 1, Math.floor(last)); k++) {
        const part = Math.max(0, Math.min(last, k + 1) - Math.max(first, k));
        rate[k] += speed * part; known[k] += part;
      }
    }
    for (let k = 0; k < bins; k++) if (known[k]) rate[k] /= known[k];
    // after the last sample nothing is known yet, unless the training is stalled
    const end = s.training.stalled_s ? bins : Math.min(bins, (s.pace[s.pace.length - 1].at - from) / wide), x = (k) => left + k * (width - left - 8) / bins;
    const highest = Math.max(1e-9, ...rate), y = (v) => low - (low - top) * v / highest;
    g.fillStyle = colour("--line"); g.fillRect(left, top, width - left - 8, 1); g.fillRect(left, low, width - left - 8, 1);
    g.beginPath(); g.moveTo(left, low);
    for (let k = 0; k < end; k++) { g.lineTo(x(k), y(rate[k])); g.lineTo(x(Math.min(k + 1, end)), y(rate[k])); }
    g.lineTo(x(end), low); g.closePath();
    g.globalAlpha = 0.25; g.fillStyle = colour("--accent"); g.fill(); g.globalAlpha = 1; g.strokeStyle = colour("--accent"); g.lineWidth = 1.5; g.stroke();
    const label = highest < 10 ? highest.toPrecision(2) : digits.format(Math.round(highest));
    $("pace").dataset.highest = label; $("pace").dataset.last = rate[Math.max(0, Math.ceil(end) - 1)];
    g.fillStyle = colour("--soft"); g.textAlign = "right"; g.fillText(label, left - 6, top); g.fillText("0", left - 6, low); g.textAlign = "left";
    axis(p, left, from, to);
  }
  function members(s) {
    if ($("members-part").hidden) return;
    const p = pen($("members")), { g, width, height, colour } = p;
    if (!s.history.length) { empty(p, "Nothing has happened yet."); return; }
    const to = Math.max(serverNow(), s.history[s.history.length - 1].at), from = Math.min(s.history[0].at, to - 10), spans = new Map(), now = new Map();
    // a replica trains while it is connected and not evicted; one whose first event is its end was there before the history begins
    const of = (name, connected) => { if (!now.has(name)) { now.set(name, { connected, evicted: false, since: from }); spans.set(name, []); } return now.get(name); };
    const trains = (r) => r.connected && !r.evicted;
    for (const e of s.history) {
      if (!e.replica || e.replica.startsWith("agent-")) continue;
      const ends = ["lost", "left", "finished", "evicted"].includes(e.kind), comes = ["connected", "returned"].includes(e.kind);
      if (!ends && !comes && e.kind !== "let_in") continue;
      const r = of(e.replica, ends), before = trains(r);
      if (comes) r.connected = true; else if (e.kind === "evicted") r.evicted = true; else if (e.kind === "let_in") r.evicted = false; else r.connected = false;
      if (trains(r) && !before) r.since = e.at;
      if (before && !trains(r)) { spans.get(e.replica).push([r.since, e.at, false]); if (e.kind === "lost" || e.kind === "evicted") spans.get(e.replica).push([e.at, e.at, true]); }
    }
    for (const r of s.replicas) if (r.state !== "observer") of(r.replica, !["lost", "left", "evicted", "finished"].includes(r.state));
    for (const [name, r] of now) if (trains(r)) spans.get(name).push([r.since, to, false]);
    const listed = [...spans.keys()].sort(names.compare);
    if (!listed.length) { empty(p, "No replica yet."); return; }
    if (listed.length <= STRIP_ROWS) strip(p, listed, spans, from, to); else counted(p, spans, from, to);
  }
  function strip(p, names, spans, from, to) {
    const { g, width, height, colour } = p, left = Math.min(140, 20 + Math.max(...names.map((n) => g.measureText(n).width))), tall = (height - 34) / names.length;
    const x = (t) => left + (width - left - 8) * (t - from) / (to - from);
    $("members").dataset.spans = JSON.stringify(Object.fromEntries(names.map((name) => [name, spans.get(name).filter(([a, b]) => b > a).map(([a, b]) => [a, b])])));
    names.forEach((name, i) => {
      const y = 8 + i * tall;
      for (const [a, b, bad] of spans.get(name)) { g.fillStyle = colour(bad ? "--bad" : "--good"); g.fillRect(x(a), y + 1, Math.max(2.5, x(b) - x(a)), Math.max(2, Math.min(16, tall - 3))); }
      if (tall >= 13 || i % Math.ceil(13 / tall) === 0) { g.fillStyle = colour("--soft"); g.fillText(name, 8, y + Math.min(16, tall) / 2, left - 14); }
    });
    axis(p, left, from, to);
  }
  function counted(p, spans, from, to) {
    const { g, width, height, colour } = p, left = 44, top = 14, low = height - 24, events = [];
    for (const list of spans.values()) for (const [a, b, bad] of list) if (b > a && !bad) events.push([a, 1], [b, -1]);
    events.sort((a, b) => a[0] - b[0]);
    const x = (t) => left + (width - left - 8) * (t - from) / (to - from), y = (n) => low - (low - top) * n / spans.size;
    let count = 0;
    g.beginPath(); g.moveTo(left, low);
    for (const [at, change] of events) { if (at >= to) break; g.lineTo(x(at), y(count)); count += change; g.lineTo(x(at), y(count)); }
    g.lineTo(x(to), y(count)); g.lineTo(x(to), low); g.closePath();
    g.globalAlpha = 0.3; g.fillStyle = colour("--good"); g.fill(); g.globalAlpha = 1;
    g.fillStyle = colour("--soft"); g.textAlign = "right"; g.fillText(String(spans.size), left - 6, top); g.fillText("0", left - 6, low); g.textAlign = "left";
    axis(p, left, from, to);
  }

  // ---- actions
  async function act(path, body) {
    const said = $("said");
    try {
      const here = ["localhost", "[::1]"].includes(location.hostname) || /^127\./.test(location.hostname);
      if (location.protocol !== "https:" && !here) throw "This page is not encrypted, so the token is not sent: use TLS, an ssh tunnel, or `allranks lighthouse`.";
      const answer = await fetch(path, { method: "POST", headers: { Authorization: "Bearer " + $("token").value, "Content-Type": "application/json" }, body: JSON.stringify(body) });
      const found = await answer.json();
      text(said, found.error || "Done."); said.className = found.error ? "bad" : "soft";
    } catch (error) { text(said, String(error)); }
    said.closest("details").open = true;
  }
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-replica]");
    if (button && confirm(`${button.textContent} ${button.dataset.replica}?`)) act(`/api/replicas/${encodeURIComponent(button.dataset.replica)}/${button.dataset.action}`, { reason: "by hand, on the page" });
  });
  $("collect").addEventListener("click", () => act("/api/collect", { reason: "by hand, on the page" }));
  $("filter").addEventListener("input", () => status && rows(status));
  $("more").addEventListener("click", () => { all = true; rows(status); });
  const redraw = () => { if (status) { pace(status); members(status); } };
  addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  // ---- the stream; without it the first line says so, for what it said before may no longer be true
  const QUIET_S = 8;  // a status comes every two seconds
  let heard = 0;
  function connection(on, words) { text($("live"), words); $("live").className = "pill " + (on ? "good" : "bad"); }
  function check(lost) {
    const quiet = (performance.now() - heard) / 1000;
    if (!lost && (!heard || quiet < QUIET_S)) return;
    connection(false, lost ? "connection lost, trying again" : "no news");
    $("now").className = "now warn";
    const last = status ? ` Last known: ${status.training.sentence}` : "";
    text($("sentence"), `No news from the lighthouse${heard ? ` for ${age(quiet)}` : ""}.${last}`);
    document.title = "No news: " + (status ? status.job || "job" : "job");
  }
  const source = new EventSource("/api/events");
  source.onmessage = (event) => { heard = performance.now(); show(JSON.parse(event.data)); connection(true, "live"); document.body.dataset.ready = "yes"; };
  source.onerror = () => check(true);
  setInterval(() => check(source.readyState !== EventSource.OPEN), 1000);
})();
