"use strict";
// The timeline of a diagnosis: one row per rank, one bar per call. Pixels, not objects: two million calls stay quick.
(async function () {
  const byId = (id) => document.getElementById(id);
  if (location.search === "?timeline") document.body.className = "only-timeline";  // in a frame of the job's page
  const meta = JSON.parse(byId("timeline").textContent);
  const fault = meta.fault;

  function make(tag, text, name) {
    const node = document.createElement(tag);
    if (text !== undefined && text !== null) node.textContent = String(text);
    if (name) node.className = name;
    return node;
  }
  async function column(name, Type) {
    const raw = Uint8Array.from(atob(byId("column-" + name).textContent.trim()), (c) => c.charCodeAt(0));
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
  const named = (row) => meta.names[row] || `rank ${meta.ranks[row]}`;
  const rowIndex = new Map(meta.ranks.map((rank, row) => [rank, row]));
  const rowsOf = (ranks) => ranks.map((rank) => rowIndex.get(rank)).filter((row) => row !== undefined);
  const guiltyRows = new Set(fault ? rowsOf(fault.ranks) : []);
  const OPEN = 0, DONE = 1, FAILED = 2;

  // ---- the call that the guilty ranks never entered: from the first entry of the others to the end
  const missing = { from: -1, text: "" };
  if (fault && fault.missing) {
    for (const row of rowsOf(fault.waiting.length ? fault.waiting : meta.ranks)) {
      if (guiltyRows.has(row)) continue;
      for (let i = offsets[row + 1] - 1, seen = 0; i >= offsets[row] && seen < 200; i--, seen++) {
        if (states[i] === DONE || (fault.sequence !== null && seqs[i] !== fault.sequence)) continue;
        if (missing.from < 0 || starts[i] < missing.from) { missing.from = starts[i]; missing.text = meta.kinds[kinds[i]][0] + (seqs[i] >= 0 ? ` #${seqs[i]}` : ""); }
      }
    }
  }

  // ---- view and colours
  const canvas = byId("canvas"), context = canvas.getContext("2d");
  const TOP = 26, ROW = 24;
  const view = { from: 0, to: Math.max(1, meta.end), row: 0, height: 0 };
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  let wanted = null, scale = 1, width = 0, height = 0, left = 0, top_ = 0;
  function hash(text) { let h = 7; for (const c of text) h = (h * 31 + c.charCodeAt(0)) >>> 0; return h; }
  const hues = meta.kinds.map(([op, group]) => 165 + (hash(group + "/" + op) % 120));
  function channel(h, s, l, n) { const k = (n + h / 30) % 12; return Math.round(255 * (l - s * Math.min(l, 1 - l) * Math.max(-1, Math.min(k - 3, 9 - k, 1)))); }
  const rgb = (h, s, l) => (255 << 24) | (channel(h, s, l, 4) << 16) | (channel(h, s, l, 8) << 8) | channel(h, s, l, 0);
  function palette() {
    const dark = scheme.matches;
    return dark
      ? { done: hues.map((h) => rgb(h, 0.38, 0.34)), open: rgb(38, 0.85, 0.33), failed: rgb(4, 0.62, 0.42), unknown: rgb(215, 0.08, 0.36), faint: rgb(215, 0.1, 0.18), back: rgb(213, 0.22, 0.075),
        row: rgb(4, 0.4, 0.13), text: "#e6e9ee", soft: "#a2adba", grid: "#232a34", bad: "#ff8f87", inBar: "rgb(255 255 255)", ground: "#0f1318" }
      : { done: hues.map((h) => rgb(h, 0.48, 0.74)), open: rgb(40, 0.95, 0.62), failed: rgb(4, 0.8, 0.72), unknown: rgb(215, 0.1, 0.78), faint: rgb(215, 0.15, 0.93), back: rgb(0, 0, 1),
        row: rgb(4, 0.8, 0.965), text: "#1b1f24", soft: "#57606a", grid: "#e7ebf0", bad: "#b3261e", inBar: "rgb(22 32 44)", ground: "#ffffff" };
  }
  function size() {
    scale = window.devicePixelRatio || 1;
    canvas.style.height = Math.min(500, TOP + 8 + ROW * rowsCount) + "px";
    width = Math.max(200, Math.round(canvas.clientWidth * scale));
    height = Math.round(canvas.clientHeight * scale);
    canvas.width = width; canvas.height = height;
    context.font = `${12 * scale}px system-ui, "DejaVu Sans", sans-serif`;
    left = Math.ceil(context.measureText("▸ " + (meta.names.length ? meta.names.reduce((a, b) => (a.length > b.length ? a : b)) : `rank ${Math.max(0, ...meta.ranks)}`)).width + 22 * scale);
    top_ = Math.round(TOP * scale);
    if (!view.height) showAll(false);
  }
  const fullHeight = () => (height - top_) / Math.max(1, rowsCount);
  function showAll(paint = true) {
    view.from = 0; view.to = Math.max(1, meta.end); view.row = 0;
    view.height = Math.min(ROW * scale, fullHeight());
    if (paint) draw();
  }
  function clamp() {
    const span = Math.min(Math.max(4, view.to - view.from), Math.max(8, meta.end * 1.1));
    view.from = Math.min(Math.max(view.from, -span * 0.2), meta.end - span * 0.2);
    view.to = view.from + span;
    view.height = Math.min(40 * scale, Math.max(Math.min(ROW * scale, fullHeight()), view.height));
    view.row = Math.max(0, Math.min(view.row, rowsCount - (height - top_) / view.height));
  }
  const xOf = (t) => left + (t - view.from) * (width - left) / (view.to - view.from);
  const tOf = (x) => view.from + (x - left) * (view.to - view.from) / (width - left);
  function firstAt(row, t) {
    let low = offsets[row], high = offsets[row + 1];
    while (low < high) { const mid = (low + high) >> 1; if (starts[mid] < t) low = mid + 1; else high = mid; }
    return low;
  }

  // ---- drawing
  let pending = false;
  function draw() { if (!pending) { pending = true; requestAnimationFrame(() => { pending = false; clamp(); paintAll(); }); } }
  function paintAll() {
    const colors = palette(), image = context.createImageData(width, height), pixels = new Uint32Array(image.data.buffer);
    const words = [];
    pixels.fill(colors.back | 0);
    const ratio = (width - left) / (view.to - view.from), gap = view.height >= 5 * scale ? Math.max(1, Math.round(2 * scale)) : 0;
    const lastRow = Math.min(rowsCount, Math.ceil(view.row + (height - top_) / view.height));
    for (let row = Math.max(0, Math.floor(view.row)); row < lastRow; row++) {
      const yTop = Math.max(top_, Math.round(top_ + (row - view.row) * view.height));
      const yEnd = Math.min(height, Math.max(yTop + 1, Math.round(top_ + (row + 1 - view.row) * view.height) - gap));
      if (guiltyRows.has(row) && view.height >= 2) fill(pixels, left, width, yTop, yEnd, colors.row);
      let from = firstAt(row, view.from), covered = -1;
      from = Math.max(offsets[row], from - 64);  // calls that began before the view and reach into it
      for (let i = from; i < offsets[row + 1] && starts[i] <= view.to; i++) {
        if (starts[i] + lengths[i] < view.from) continue;
        const a = Math.max(left, Math.round(left + (starts[i] - view.from) * ratio));
        const b = Math.min(width, Math.max(a + 2, Math.round(left + (starts[i] + lengths[i] - view.from) * ratio) - (ratio > 2 ? 1 : 0)));
        const state = states[i];
        if (b <= covered && state === DONE && !wanted) continue;
        covered = Math.max(covered, b);
        const faint = wanted && !wanted(i, row);
        const color = faint ? colors.faint : state === OPEN ? colors.open : state === FAILED ? colors.failed : state === DONE ? colors.done[kinds[i]] : colors.unknown;
        fill(pixels, a, b, yTop, yEnd, color);
        if (!faint && b - a > 46 * scale && yEnd - yTop >= 14 * scale) words.push([a, b, (yTop + yEnd) / 2, i]);
      }
    }
    context.putImageData(image, 0, 0);
    barTexts(words, colors);
    missingCall(colors, lastRow);
    frame(colors);
    rankLabels(colors, lastRow);
    ticks(colors);
  }
  function fill(pixels, a, b, yTop, yEnd, color) {
    for (let y = yTop; y < yEnd; y++) pixels.fill(color, y * width + a, y * width + b);
  }
  function barTexts(words, colors) {
    context.font = `${11.5 * scale}px system-ui, "DejaVu Sans", sans-serif`;
    context.textBaseline = "middle";
    context.fillStyle = colors.inBar;
    for (const [a, b, y, i] of words.slice(0, 4000)) {
      const op = meta.kinds[kinds[i]][0], room = b - a - 10 * scale;
      const text = [`${op} #${seqs[i]}`, op].find((one) => context.measureText(one).width <= room);
      if (text) context.fillText(text, a + 5 * scale, y);
    }
  }
  function missingCall(colors, lastRow) {
    if (missing.from < 0 || missing.from > view.to) return;
    const x = Math.max(left, xOf(missing.from));
    context.strokeStyle = colors.bad; context.fillStyle = colors.bad; context.lineWidth = 1.5 * scale;
    context.setLineDash([4 * scale, 3 * scale]);
    for (const row of guiltyRows) {
      const y = top_ + (row - view.row) * view.height;
      if (row < Math.floor(view.row) || row >= lastRow || y < top_ - 1) continue;
      const tall = Math.max(3 * scale, view.height - 3 * scale);
      context.strokeRect(x + 1, y + 0.5 * scale, width - x - 3, tall);
      const text = `never entered ${missing.text}`;
      context.font = `600 ${11.5 * scale}px system-ui, "DejaVu Sans", sans-serif`;
      if (tall >= 14 * scale && context.measureText(text).width < width - x - 12 * scale) context.fillText(text, x + 6 * scale, y + tall / 2);
    }
    context.setLineDash([]);
  }
  function frame(colors) {
    context.fillStyle = colors.ground;
    context.fillRect(0, 0, left, height); context.fillRect(0, 0, width, top_);
    context.fillStyle = colors.grid;
    context.fillRect(left - 1, 0, 1, height); context.fillRect(0, top_ - 1, width, 1);
  }
  function rankLabels(colors, lastRow) {
    const rows = [], placed = [], tall = 15 * scale;
    for (let row = Math.max(0, Math.floor(view.row)); row < lastRow; row++) rows.push(row);
    const every = Math.max(1, Math.ceil(tall / view.height));
    const first = rows.filter((row) => guiltyRows.has(row)), rest = rows.filter((row) => !guiltyRows.has(row) && meta.ranks[row] % niceStep(every) === 0);
    context.textBaseline = "middle";
    for (const row of [...first, ...rest]) {
      const y = top_ + (row + 0.5 - view.row) * view.height - (view.height > 5 * scale ? scale : 0);
      if (y < top_ + tall / 2 - 2 || y > height - tall / 2 + 4 * scale || placed.some((other) => Math.abs(other - y) < tall)) continue;
      placed.push(y);
      const guilty = guiltyRows.has(row);
      context.font = `${guilty ? "600 " : ""}${12 * scale}px system-ui, "DejaVu Sans", sans-serif`;
      context.fillStyle = guilty ? colors.bad : colors.soft;
      context.fillText(`${guilty ? "▸ " : ""}${named(row)}`, 8 * scale, y, left - 14 * scale);
    }
    canvas.dataset.labels = JSON.stringify(placed);
  }
  function niceStep(least) { for (let power = 1; ; power *= 2) if (power >= least) return power; }
  function tickText(value, step) {
    if (Math.abs(value) < step / 2) value = 0;
    const [unit, name] = step >= 1 ? [1, "s"] : step >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
    const digits = Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9));
    return `${(value / unit).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${name}`;
  }
  function ticks(colors) {
    const unit = meta.unit_ns / 1e9, from = view.from * unit, to = view.to * unit;
    context.font = `${12 * scale}px system-ui, "DejaVu Sans", sans-serif`;
    let step = Math.max(1e-6, 10 ** Math.floor(Math.log10((to - from) / 40)));
    const wide = (one) => Math.max(context.measureText(tickText(to, one)).width, context.measureText(tickText(from, one)).width) + 18 * scale;
    for (const factors = [2, 2.5, 2]; one(step) < wide(step); ) { step *= factors[0]; factors.push(factors.shift()); }
    function one(s) { return s / (to - from) * (width - left); }
    const shown = [];
    for (let k = Math.ceil(Math.max(0, from) / step - 1e-9); k * step <= to; k++) {
      const x = xOf(k * step / unit), text = tickText(k * step, step);
      if (x < left || x + context.measureText(text).width + 4 * scale > width) continue;
      context.fillStyle = colors.grid; context.fillRect(Math.round(x), top_ - 6 * scale, 1, 6 * scale);
      context.fillStyle = colors.soft; context.fillText(text, x + 3 * scale, top_ / 2);
      shown.push([x, text]);
    }
    canvas.dataset.ticks = JSON.stringify(shown);
  }

  // ---- search
  function search(text) {
    text = text.trim().toLowerCase();
    wanted = null;
    byId("count").textContent = "";
    if (text) {
      const rank = /^rank\s*(\d+)$/.exec(text), number = /^#(\d+)$/.exec(text);
      const kindHit = meta.kinds.map((kind) => kind.join(" ").toLowerCase().includes(text));
      const stackHit = meta.stacks.map((lines) => lines.join("\n").toLowerCase().includes(text));
      const row = rank ? rowIndex.get(Number(rank[1])) : -1;
      wanted = rank ? (i, r) => r === row : number ? (i) => seqs[i] === Number(number[1]) : (i) => kindHit[kinds[i]] || stackHit[stacks[i]];
      let hits = 0;
      for (let r = 0; r < rowsCount; r++) for (let i = offsets[r]; i < offsets[r + 1]; i++) if (wanted(i, r)) hits++;
      byId("count").textContent = `${hits.toLocaleString("en")} calls`;
      if (rank && row >= 0) { view.height = Math.max(view.height, 18 * scale); view.row = row - 5; }
    }
    draw();
  }
  byId("search").addEventListener("input", (event) => search(event.target.value));
  byId("all").addEventListener("click", () => { byId("search").value = ""; search(""); showAll(); });
  byId("fault").addEventListener("click", goToFault);
  byId("nearer").addEventListener("click", () => zoom(0.5, (view.from + view.to) / 2));
  byId("further").addEventListener("click", () => zoom(2, (view.from + view.to) / 2));
  byId("fault").hidden = !fault;
  function zoom(factor, t) { view.from = t - (t - view.from) * factor; view.to = t + (view.to - t) * factor; draw(); }
  function goToFault() {
    const rows = rowsOf(fault.ranks.concat(fault.waiting));
    if (!rows.length) return;
    const row = rows[0];
    let latest = missing.from;
    if (latest < 0) for (const one of rows) if (offsets[one + 1] > offsets[one]) latest = Math.max(latest, starts[offsets[one + 1] - 1]);
    const back = Math.max(offsets[row], offsets[row + 1] - 8);
    const from = offsets[row + 1] > offsets[row] ? starts[back] : latest;
    const span = Math.max(20, (latest - Math.min(from, latest)) * 1.3);
    view.from = Math.max(0, latest - span); view.to = latest + span * 0.8;
    view.height = Math.max(view.height, Math.min(22 * scale, (height - top_) / Math.min(rowsCount, 20)));
    view.row = row - 4;
    draw();
  }

  // ---- pointer, wheel and keys
  function hit(event) {
    const box = canvas.getBoundingClientRect(), x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    const row = Math.floor(view.row + (y - top_) / view.height);
    if (y < top_ || row < 0 || row >= rowsCount) return null;
    if (x < left) return { row, call: -1 };
    const t = tOf(x), slack = 3 * (view.to - view.from) / width;
    for (let i = firstAt(row, t + slack) - 1, looked = 0; i >= offsets[row] && looked < 200; i--, looked++) {
      if (starts[i] + Math.max(lengths[i], slack) >= t - slack) return { row, call: i };
    }
    return { row, call: -1 };
  }
  function describe(found) {
    const host = meta.hosts[found.row] ? ` (${meta.hosts[found.row]})` : "";
    if (found.call < 0) return `${named(found.row)}${host}: ${meta.counts[found.row].toLocaleString("en")} calls` + (guiltyRows.has(found.row) && missing.text ? `\nnever entered ${missing.text}` : "");
    const i = found.call, [op, group, sizes] = meta.kinds[kinds[i]];
    const state = ["not finished", "finished", "failed or timed out", "ended, time unknown"][states[i]];
    const took = states[i] === DONE ? `, took ${(lengths[i] * meta.unit_ns / 1e6).toFixed(3)} ms` : "";
    const at = Number(meta.base_ns) / 1e6 + starts[i] * meta.unit_ns / 1e6;
    const time = at > 1e11 ? new Date(at).toISOString().slice(11, 23) : (starts[i] * meta.unit_ns / 1e6).toFixed(3) + " ms";
    return `${named(found.row)}${host}\n${op} #${seqs[i]} of ${group}\n${sizes}\n${state}${took}, entered ${time}\n${(meta.stacks[stacks[i]].find((l) => !library(l)) || "")}`;
  }
  const library = (line) => /\/torch\/|site-packages|dist-packages|\/lib\/python3|^</.test(line);
  const tip = byId("tip");
  let drag = null;
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const dx = (event.clientX - drag.x) * scale * (view.to - view.from) / (width - left);
      view.from = drag.from - dx; view.to = drag.to - dx;
      if (event.pointerType === "mouse") view.row = drag.row - (event.clientY - drag.y) * scale / view.height;
      tip.hidden = true; draw();
      return;
    }
    const found = hit(event);
    tip.hidden = !found;
    if (found) {
      tip.textContent = describe(found);
      const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
      tip.style.left = Math.max(4, Math.min(x + 14, box.width - tip.offsetWidth - 8)) + "px";
      tip.style.top = (y + 14 + tip.offsetHeight > box.height ? Math.max(2, y - tip.offsetHeight - 8) : y + 14) + "px";
    }
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, y: event.clientY, from: view.from, to: view.to, row: view.row }; });
  addEventListener("pointercancel", () => { drag = null; });
  addEventListener("pointerup", (event) => {
    if (drag && Math.abs(event.clientX - drag.x) + Math.abs(event.clientY - drag.y) < 4) pin(event);
    drag = null;
  });
  function pin(event) {
    const found = hit(event), detail = byId("detail");
    detail.hidden = !found;
    if (!found) return;
    const card = make("div", null, "panel");
    card.append(make("p", describe(found).split("\n").filter(Boolean).join(" · ")));
    const list = make("ol", null, "frames");
    for (const line of found.call >= 0 ? meta.stacks[stacks[found.call]] : []) list.append(make("li", line, library(line) ? "lib" : ""));
    card.append(list);
    detail.replaceChildren(card);
  }
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.altKey && !event.shiftKey) return;  // the page scrolls
    event.preventDefault();
    const box = canvas.getBoundingClientRect();
    if (event.shiftKey) {
      const move = (event.deltaX || event.deltaY) * (view.to - view.from) / 1000;
      view.from += move; view.to += move;
      draw();
    } else if (event.altKey) {
      const y = (event.clientY - box.top) * scale, row = view.row + (y - top_) / view.height;
      view.height *= Math.exp(-event.deltaY / 400);
      clamp();
      view.row = row - (y - top_) / view.height;
      draw();
    } else zoom(Math.exp(event.deltaY / 400), tOf((event.clientX - box.left) * scale));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const span = view.to - view.from, keys = {
      ArrowLeft: () => { view.from -= span / 8; view.to -= span / 8; }, ArrowRight: () => { view.from += span / 8; view.to += span / 8; },
      ArrowUp: () => { view.row -= 4; }, ArrowDown: () => { view.row += 4; },
      "+": () => { view.from += span / 4; view.to -= span / 4; }, "-": () => { view.from -= span / 2; view.to += span / 2; } };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); draw(); }
  });

  // ---- legend
  function css(color) { return `rgb(${color & 255} ${(color >> 8) & 255} ${(color >> 16) & 255})`; }
  function legend() {
    const colors = palette();
    canvas.dataset.words = colors.inBar;
    byId("legend").replaceChildren(...[["finished (colour: operation and group)", colors.done[Math.min(1, colors.done.length - 1)]], ["not finished", colors.open], ["failed or timed out", colors.failed]].map(([name, color]) => {
      const item = make("span"), box = make("i");
      box.style.background = css(color);
      item.append(box, name);
      return item;
    }), make("span", "Ctrl + wheel zooms, Shift + wheel or drag moves, Alt + wheel changes the row height, click shows the stack", "noprint"));
  }
  addEventListener("resize", () => { size(); draw(); });
  scheme.addEventListener("change", () => { legend(); draw(); });
  size(); legend();
  if (rowsCount > 64 && fault) goToFault();
  clamp(); paintAll();
  document.body.dataset.ready = "yes";
  if (document.body.className) new ResizeObserver(() => parent.postMessage({ height: document.body.offsetHeight }, "*")).observe(document.body);
})();
