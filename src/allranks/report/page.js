"use strict";
(async function () {
  const byId = (id) => document.getElementById(id);
  const report = JSON.parse(byId("report").textContent);
  const meta = JSON.parse(byId("timeline").textContent);

  function make(tag, text, name) {
    const node = document.createElement(tag);
    if (text !== undefined && text !== null) node.textContent = String(text);
    if (name) node.className = name;
    return node;
  }
  function listCard(title, lines) {
    if (!lines || !lines.length) return null;
    const card = make("div", null, "card");
    card.append(make("h3", title));
    const list = make("ul");
    for (const line of lines) list.append(make("li", line));
    card.append(list);
    return card;
  }
  function ranksText(ranks) {
    if (!ranks.length) return "–";
    const runs = [];
    for (const r of ranks) {
      const last = runs[runs.length - 1];
      if (last && last[1] === r - 1) last[1] = r; else runs.push([r, r]);
    }
    const parts = runs.slice(0, 12).map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`));
    return parts.join(", ") + (runs.length > 12 ? `, … (${ranks.length})` : "");
  }

  // ---- the verdict
  const verdict = report.verdict;
  const badge = byId("badge");
  badge.textContent = { fault: "fault found", ok: "nothing wrong", unclear: "unclear" }[report.status];
  badge.className = report.status;
  byId("sentence").textContent = verdict ? verdict.sentence : report.status === "ok"
    ? "The calls of all ranks fit together and none is stuck." : "There are no calls to judge.";
  if (verdict) {
    const parts = [`cause ${verdict.cause}`, `confidence ${Math.round(verdict.confidence * 100)} %`];
    if (verdict.group) parts.push(`group ${verdict.group}` + (verdict.sequence === null ? "" : ` #${verdict.sequence}`));
    if (verdict.where) parts.push(`at ${verdict.where}`);
    if (verdict.waiting.length) parts.push(`${verdict.waiting.length} ranks wait`);
    byId("scope").textContent = parts.join(" · ");
    for (const card of [listCard("evidence", verdict.evidence), listCard("what to do", verdict.advice),
      listCard("missing evidence", verdict.missing_evidence)]) if (card) byId("facts").append(card);
    if (verdict.stacks.length) {
      byId("stacks").append(make("h2", "Stacks"));
      for (const stack of verdict.stacks.slice(0, 12)) {
        const guilty = stack.ranks.some((r) => verdict.ranks.includes(r));
        const card = make("div", null, "card");
        card.append(make("h3", `rank${stack.ranks.length > 1 ? "s" : ""} ${ranksText(stack.ranks)} (${guilty ? "guilty" : "waiting"}${stack.label ? `, ${stack.label}` : ""})`));
        card.append(framesNode(stack.frames.map((f) => `${f.file}:${f.line} in ${f.name}`)));
        byId("stacks").append(card);
      }
    }
  }
  function framesNode(lines) {
    const pre = make("pre");
    for (const line of lines) pre.append(make("span", line + "\n", /\/torch\/|site-packages|^</.test(line) ? "lib" : ""));
    return pre;
  }
  function table(id, title, heads, rows, open) {
    if (!rows.length) return;
    const box = make("details");
    box.open = open;
    box.append(make("summary", title));
    const grid = make("table"), head = make("tr");
    for (const text of heads) head.append(make("th", text));
    grid.append(head);
    for (const row of rows) {
      const line = make("tr");
      for (const cell of row) {
        const [text, name] = Array.isArray(cell) ? cell : [cell, ""];
        line.append(make("td", text, name));
      }
      grid.append(line);
    }
    box.append(grid);
    byId(id).append(box);
  }
  table("findings", `Findings (${report.findings.length})`, ["", "cause", "ranks", "group", "what"], report.findings.map((f) =>
    [[f.severity, f.severity], f.cause, ranksText(f.ranks), f.group + (f.sequence === null ? "" : ` #${f.sequence}`), f.sentence]), true);
  table("groups", `Groups (${report.group_count})`, ["group", "library", "members", "calls", "behind"], report.groups.map((g) =>
    [g.label, g.backend, `${g.members}${g.known ? "" : " (as seen)"}`, g.last === null ? "–" : `#${g.first} to #${g.last}`, [g.behind, g.behind ? "bad" : ""]]), report.groups.length < 40);
  table("files", `Files (${report.file_count})`, ["file", "rank", "kind", "status", "note"], report.files.map((f) =>
    [f.path, f.rank === null ? "–" : f.rank, f.kind, [f.status, f.status === "ok" ? "" : "bad"], f.note]), report.files.some((f) => f.status !== "ok") && report.files.length < 60);
  byId("summary").textContent = report.summary.join("; ") + (meta.left_out ? `; the timeline leaves out the oldest ${meta.left_out} calls` : "");

  // ---- the columns
  async function column(name, Type) {
    const text = byId("column-" + name).textContent;
    const raw = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Type(await new Response(stream).arrayBuffer());
  }
  const [starts, lengths, kinds, seqs, states, stacks] = await Promise.all([column("starts", Int32Array), column("lengths", Int32Array),
    column("kinds", Uint16Array), column("seqs", Int32Array), column("states", Uint8Array), column("stacks", Uint16Array)]);
  const rowsCount = meta.ranks.length, offsets = new Uint32Array(rowsCount + 1);
  for (let r = 0; r < rowsCount; r++) {
    offsets[r + 1] = offsets[r] + meta.counts[r];
    for (let i = offsets[r] + 1; i < offsets[r + 1]; i++) starts[i] += starts[i - 1];
  }
  const guiltyRows = new Set(verdict ? verdict.ranks.map((r) => meta.ranks.indexOf(r)) : []);

  // ---- drawing: pixels, not objects, so that two million calls stay quick
  const canvas = byId("canvas"), context = canvas.getContext("2d");
  const LEFT = 96, TOP = 24;
  const view = { from: 0, to: Math.max(1, meta.end), row: 0, height: 0 };
  const dark = () => matchMedia("(prefers-color-scheme: dark)").matches;
  let wanted = null;
  function hash(text) { let h = 7; for (const c of text) h = (h * 31 + c.charCodeAt(0)) >>> 0; return h; }
  function rgb(h, s, l) {
    const f = (n) => { const k = (n + h / 30) % 12; return Math.round(255 * (l - s * Math.min(l, 1 - l) * Math.max(-1, Math.min(k - 3, 9 - k, 1)))); };
    return (255 << 24) | (f(4) << 16) | (f(8) << 8) | f(0);
  }
  const hues = meta.kinds.map(([op, group]) => 150 + (hash(group + "/" + op) % 150));
  function palette() {
    const l = dark() ? 0.5 : 0.55;
    return { done: hues.map((h) => rgb(h, 0.45, l) | 0), open: rgb(32, 0.95, 0.55), guilty: rgb(0, 0.85, 0.55), failed: rgb(0, 0.9, 0.4),
      faint: dark() ? rgb(210, 0.08, 0.25) : rgb(210, 0.1, 0.86), back: dark() ? rgb(210, 0.14, 0.1) : rgb(0, 0, 1), row: dark() ? rgb(0, 0.5, 0.16) : rgb(0, 0.8, 0.96) };
  }
  let scale = 1, width = 0, height = 0;
  function size() {
    scale = window.devicePixelRatio || 1;
    canvas.style.height = Math.max(140, Math.min(520, TOP + 8 + 28 * rowsCount)) + "px";
    width = Math.max(300, Math.round(canvas.clientWidth * scale));
    height = Math.round(canvas.clientHeight * scale);
    canvas.width = width; canvas.height = height;
    if (!view.height) showAll(false);
  }
  const left = () => Math.round(LEFT * scale), top_ = () => Math.round(TOP * scale);
  function showAll(paint = true) {
    view.from = 0; view.to = Math.max(1, meta.end); view.row = 0;
    view.height = Math.min(28 * scale, (height - top_()) / Math.max(1, rowsCount));
    if (paint) draw();
  }
  const xOf = (t) => left() + (t - view.from) * (width - left()) / (view.to - view.from);
  const tOf = (x) => view.from + (x - left()) * (view.to - view.from) / (width - left());
  const rowOf = (y) => Math.floor(view.row + (y - top_()) / view.height);
  function firstAt(row, t) {
    let low = offsets[row], high = offsets[row + 1];
    while (low < high) { const mid = (low + high) >> 1; if (starts[mid] < t) low = mid + 1; else high = mid; }
    return low;
  }
  let pending = false;
  function draw() { if (!pending) { pending = true; requestAnimationFrame(() => { pending = false; paintAll(); }); } }
  function paintAll() {
    const colors = palette(), image = context.createImageData(width, height), pixels = new Uint32Array(image.data.buffer);
    pixels.fill(colors.back);
    const x0 = left(), y0 = top_(), ratio = (width - x0) / (view.to - view.from), gap = view.height >= 5 * scale ? Math.max(1, Math.round(scale)) : 0;
    const lastRow = Math.min(rowsCount, Math.ceil(view.row + (height - y0) / view.height));
    for (let row = Math.max(0, Math.floor(view.row)); row < lastRow; row++) {
      const yTop = Math.max(y0, Math.round(y0 + (row - view.row) * view.height));
      const yEnd = Math.min(height, Math.max(yTop + 1, Math.round(y0 + (row + 1 - view.row) * view.height) - gap));
      const guilty = guiltyRows.has(row);
      if (guilty && view.height >= 2) fill(pixels, x0, width, yTop, yEnd, colors.row);
      let from = firstAt(row, view.from), covered = -1;
      while (from > offsets[row] && starts[from - 1] + lengths[from - 1] >= view.from) { from--; if (offsets[row] + 64 < from && states[from] === 1) break; }
      for (let i = from; i < offsets[row + 1]; i++) {
        if (starts[i] > view.to) break;
        const a = Math.max(x0, Math.round(x0 + (starts[i] - view.from) * ratio));
        let b = Math.min(width, Math.max(a + 2, Math.round(x0 + (starts[i] + lengths[i] - view.from) * ratio)));
        if (b <= covered && states[i] === 1 && !wanted) continue;
        covered = b;
        const state = states[i];
        let color = state === 0 ? (guilty ? colors.guilty : colors.open) : state === 2 ? colors.failed : colors.done[kinds[i]];
        if (wanted && !wanted(i, row)) color = colors.faint;
        fill(pixels, a, b, yTop, yEnd, color);
      }
    }
    context.putImageData(image, 0, 0);
    labels(lastRow);
  }
  function fill(pixels, a, b, yTop, yEnd, color) {
    for (let y = yTop; y < yEnd; y++) pixels.fill(color, y * width + a, y * width + b);
  }
  function labels(lastRow) {
    const text = dark() ? "#c9d1d9" : "#30363d";
    context.fillStyle = dark() ? "#14171b" : "#ffffff";
    context.fillRect(0, 0, left(), height); context.fillRect(0, 0, width, top_());
    context.font = `${12 * scale}px system-ui, "DejaVu Sans", sans-serif`;
    context.textBaseline = "middle";
    const every = Math.max(1, Math.ceil(15 * scale / view.height));
    for (let row = Math.max(0, Math.floor(view.row)); row < lastRow; row++) {
      const guilty = guiltyRows.has(row);
      if (row % every && !(guilty && guiltyRows.size < 20)) continue;
      const y = top_() + (row + 0.5 - view.row) * view.height;
      if (y < top_()) continue;
      if (guilty) { context.fillStyle = dark() ? "#14171b" : "#fff"; context.fillRect(0, y - 8 * scale, left() - 2, 16 * scale); }
      context.fillStyle = guilty ? (dark() ? "#ff7b72" : "#c62828") : text;
      context.fillText(`${guilty ? "▶ " : ""}rank ${meta.ranks[row]}`, 8 * scale, y, left() - 12 * scale);
    }
    context.fillStyle = text;
    const span = (view.to - view.from) * meta.unit_ns / 1e9, steps = 6;
    for (let i = 0; i < steps; i++) {
      const t = view.from + (view.to - view.from) * i / steps;
      context.fillText(seconds(t * meta.unit_ns / 1e9, span), xOf(t) + 2, top_() / 2);
    }
  }
  function seconds(value, span) { return span < 0.01 ? `${(value * 1e6).toFixed(0)} µs` : span < 10 ? `${(value * 1e3).toFixed(1)} ms` : `${value.toFixed(1)} s`; }

  // ---- search
  function search(text) {
    text = text.trim().toLowerCase();
    wanted = null;
    byId("count").textContent = "";
    if (text) {
      const rank = /^rank\s*(\d+)$/.exec(text);
      const kindHit = meta.kinds.map((kind) => kind.join(" ").toLowerCase().includes(text));
      const stackHit = meta.stacks.map((lines) => lines.join("\n").toLowerCase().includes(text));
      const number = /^#(\d+)$/.exec(text);
      const row = rank ? meta.ranks.indexOf(Number(rank[1])) : -1;
      wanted = rank ? (i, r) => r === row : number ? (i) => seqs[i] === Number(number[1]) : (i) => kindHit[kinds[i]] || stackHit[stacks[i]];
      let hits = 0;
      for (let r = 0; r < rowsCount; r++) for (let i = offsets[r]; i < offsets[r + 1]; i++) if (wanted(i, r)) hits++;
      byId("count").textContent = `${hits.toLocaleString("en")} calls`;
      if (rank && row >= 0) { view.height = Math.max(view.height, 18 * scale); view.row = Math.max(0, row - 5); }
    }
    draw();
  }
  byId("search").addEventListener("input", (event) => search(event.target.value));
  byId("all").addEventListener("click", () => { byId("search").value = ""; search(""); showAll(); });
  byId("fault").addEventListener("click", goToFault);
  if (!verdict) byId("fault").hidden = true;
  function goToFault() {
    const ranks = verdict.ranks.concat(verdict.waiting);
    const rows = ranks.map((r) => meta.ranks.indexOf(r)).filter((r) => r >= 0);
    if (!rows.length) return;
    let latest = 0;
    for (const row of rows) if (offsets[row + 1] > offsets[row]) latest = Math.max(latest, starts[offsets[row + 1] - 1]);
    const row = rows[0], back = Math.max(offsets[row], offsets[row + 1] - 12);
    const from = offsets[row + 1] > offsets[row] ? starts[back] : latest;
    const span = Math.max(20, (latest - Math.min(from, latest)) * 1.5);
    view.from = Math.max(0, latest - span); view.to = Math.min(meta.end, latest + span * 0.6);
    if (view.to <= view.from) view.to = view.from + 20;
    view.height = Math.max(view.height, Math.min(22 * scale, (height - top_()) / Math.min(rowsCount, 20)));
    view.row = Math.max(0, Math.min(row - 4, rowsCount - (height - top_()) / view.height));
    draw();
  }

  // ---- looking closer
  function hit(event) {
    const box = canvas.getBoundingClientRect(), x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    const row = rowOf(y);
    if (y < top_() || row < 0 || row >= rowsCount) return null;
    if (x < left()) return { row, call: -1 };
    const t = tOf(x), slack = 3 * (view.to - view.from) / width;
    let best = -1;
    for (let i = firstAt(row, t + slack) - 1; i >= offsets[row] && i > firstAt(row, t + slack) - 200; i--) {
      if (starts[i] + Math.max(lengths[i], slack) >= t - slack) { best = i; break; }
    }
    return { row, call: best };
  }
  function describe(found) {
    const host = meta.hosts[found.row] ? ` (${meta.hosts[found.row]})` : "";
    if (found.call < 0) return `rank ${meta.ranks[found.row]}${host}: ${meta.counts[found.row]} calls`;
    const i = found.call, [op, group, sizes] = meta.kinds[kinds[i]];
    const state = ["not finished", "finished", "failed or timed out", "over (end unknown)"][states[i]];
    const took = states[i] === 1 ? `, took ${(lengths[i] * meta.unit_ns / 1e6).toFixed(3)} ms` : "";
    const at = (Number(meta.base_ns) / 1e6 + starts[i] * meta.unit_ns / 1e6);
    const time = at > 1e11 ? new Date(at).toISOString().slice(11, 23) : (starts[i] * meta.unit_ns / 1e6).toFixed(3) + " ms";
    return `rank ${meta.ranks[found.row]}${host}\n${op} #${seqs[i]} of ${group}\n${sizes}\n${state}${took}, entered ${time}\n${(meta.stacks[stacks[i]].find((l) => !/\/torch\/|site-packages|^</.test(l)) || "")}`;
  }
  const tip = byId("tip");
  let drag = null;
  canvas.addEventListener("mousemove", (event) => {
    if (drag) {
      const dx = (event.clientX - drag.x) * scale * (view.to - view.from) / (width - left());
      view.from = drag.from - dx; view.to = drag.to - dx;
      view.row = Math.max(0, drag.row - (event.clientY - drag.y) * scale / view.height);
      tip.hidden = true; draw();
      return;
    }
    const found = hit(event);
    tip.hidden = !found;
    if (found) {
      tip.textContent = describe(found);
      const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
      tip.style.left = Math.min(x + 14, box.width - Math.min(460, tip.offsetWidth) - 8) + "px";
      tip.style.top = (y + 14 + tip.offsetHeight > box.height ? y - tip.offsetHeight - 8 : y + 14) + "px";
    }
  });
  canvas.addEventListener("mouseleave", () => { tip.hidden = true; });
  canvas.addEventListener("mousedown", (event) => { drag = { x: event.clientX, y: event.clientY, from: view.from, to: view.to, row: view.row }; });
  window.addEventListener("mouseup", (event) => {
    if (drag && Math.abs(event.clientX - drag.x) + Math.abs(event.clientY - drag.y) < 4) pin(event);
    drag = null;
  });
  function pin(event) {
    const found = hit(event), detail = byId("detail");
    detail.hidden = !found;
    if (!found) return;
    detail.replaceChildren();
    const card = make("div", null, "card");
    card.append(make("pre", describe(found)));
    if (found.call >= 0 && meta.stacks[stacks[found.call]].length) card.append(framesNode(meta.stacks[stacks[found.call]]));
    detail.append(card);
  }
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = canvas.getBoundingClientRect();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const move = (event.deltaX || event.deltaY) * (view.to - view.from) / 1000;
      view.from += move; view.to += move;
    } else if (event.ctrlKey || event.altKey) {
      const y = (event.clientY - box.top) * scale, row = view.row + (y - top_()) / view.height;
      view.height = Math.min(40 * scale, Math.max((height - top_()) / Math.max(1, rowsCount), view.height * Math.exp(-event.deltaY / 400)));
      view.row = Math.max(0, row - (y - top_()) / view.height);
    } else {
      const t = tOf((event.clientX - box.left) * scale), zoom = Math.exp(event.deltaY / 400);
      view.from = t - (t - view.from) * zoom; view.to = t + (view.to - t) * zoom;
      if (view.to - view.from < 4) view.to = view.from + 4;
    }
    draw();
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const span = view.to - view.from, keys = {
      ArrowLeft: () => { view.from -= span / 8; view.to -= span / 8; }, ArrowRight: () => { view.from += span / 8; view.to += span / 8; },
      ArrowUp: () => { view.row = Math.max(0, view.row - 4); }, ArrowDown: () => { view.row = Math.min(rowsCount - 1, view.row + 4); },
      "+": () => { view.from += span / 4; view.to -= span / 4; }, "-": () => { view.from -= span / 2; view.to += span / 2; } };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); draw(); }
  });
  const legend = byId("legend");
  for (const [name, color] of [["finished (colour: operation and group)", "hsl(210 45% 55%)"], ["not finished", "hsl(32 95% 55%)"], ["not finished, guilty rank", "hsl(0 85% 55%)"], ["failed or timed out", "hsl(0 90% 40%)"]]) {
    const box = make("i");
    box.style.background = color;
    legend.append(box, name);
  }
  legend.append(make("span", "  ·  wheel: zoom time, ctrl+wheel: zoom ranks, drag: move, click: stack"));
  addEventListener("resize", () => { size(); draw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  size();
  if (rowsCount > 64 && verdict) goToFault(); else draw();
  document.body.dataset.ready = "yes";
})();
