// The grid of ranks: one cell each, up to 100,000, on a canvas; grouped by node or by a kind of process group.
const Ranks = (function () {
  const NAMES = { c: "computing", w: "in a call", s: "sleeping", h: "healing", d: "dead", e: "ended", g: "guilty", ".": "unknown" };
  const TONES = { c: "--cell-c", w: "--cell-w", s: "--cell-s", h: "--cell-h", d: "--cell-d", e: "--cell-e", g: "--bad", ".": "--line" };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  let canvas, tip, cells = "", guilty = new Set(), layout = { nodes: [], groups: {} }, by = "", places = [], size = 16, nodeOf = new Map(), word = "rank", drawn = "";
  let onPick = () => {}, names = new Map();

  function kinds() {
    const found = new Map();
    for (const [name, ranks] of Object.entries(layout.groups)) {
      const kind = name.replace(/[\d_\-\[\], ]+$/g, "") || name;
      if (!found.has(kind)) found.set(kind, []);
      found.get(kind).push([name, ranks]);
    }
    return new Map([...found].filter(([, groups]) => groups.length > 1));
  }
  function roles() {
    const found = new Map();
    for (const [rank, name] of names) { const role = name.replace(/ \d+$/, ""); found.set(role, [...found.get(role) || [], rank]); }
    return [...found];
  }
  function blocks() {
    if ((by || "role") === "role" && names.size) return roles();
    if (kinds().has(by)) {
      const listed = kinds().get(by).sort((a, b) => a[1][0] - b[1][0]), seen = new Set(listed.flatMap(([, ranks]) => ranks));
      const rest = [...cells].map((_, r) => r).filter((r) => !seen.has(r));
      return [...listed, ...rest.length ? [["others", rest]] : []];
    }
    if (layout.nodes.length) {
      const known = layout.nodes.filter((n) => n.ranks.length).map((n) => [n.node, n.ranks]);
      return known.length ? known : [["", [...cells].map((_, r) => r)]];
    }
    return [["", [...cells].map((_, r) => r)]];
  }
  function side(count, width) { return Math.max(3, Math.min(26, Math.floor(Math.sqrt(width * 460 / Math.max(1, count))) - 3)); }
  function odd(small) {  // guilty ranks; in a large job also the few that sleep or are dead
    const found = small ? ["s", "d"].flatMap((letter) => { const ranks = [...cells].flatMap((c, r) => c === letter ? [[r, c]] : []); return ranks.length <= 8 ? ranks : []; }) : [];
    return [...found, ...[...guilty].map((r) => [r, "g"])];
  }
  function draw() {
    const count = cells.length, list = blocks(), width = canvas.parentElement.clientWidth, dpr = devicePixelRatio || 1;
    size = side(count, width);
    const labels = list.length > 1 && list.length <= 24 && size >= 11, gap = size > 5 ? 2 : size > 3 ? 1 : 0, pitch = size + gap, room = Math.max(1, Math.floor((width - 2) / pitch));
    places = new Array(count);
    let x = 0, y = 0;
    const heads = [];
    for (const [name, ranks] of list) {
      if (labels) { if (x) y += pitch; x = 0; heads.push([name, y + 12]); y += 18; }
      else if (x && x + Math.min(ranks.length, room) > room) { x = 0; y += pitch; }
      for (const rank of ranks) {
        if (x >= room) { x = 0; y += pitch; }
        places[rank] = [x * pitch, y]; x += 1;
      }
      if (!labels && list.length > 1) x += size > 5 ? 0.5 : 1;
    }
    const height = Math.ceil(y + pitch);
    canvas.style.height = height + "px";
    if (canvas.width !== Math.round(width * dpr) || canvas.height !== Math.round(height * dpr)) { canvas.width = Math.round(width * dpr); canvas.height = Math.round(height * dpr); }
    const g = canvas.getContext("2d"), tones = Object.fromEntries(Object.entries(TONES).map(([k, v]) => [k, css(v)]));
    g.setTransform(dpr, 0, 0, dpr, 0, 0); g.clearRect(0, 0, width, height);
    g.font = '12px system-ui, "DejaVu Sans", sans-serif'; g.fillStyle = css("--soft");
    for (const [name, at] of heads) g.fillText(name, 0, at, width);
    for (const letter of Object.keys(tones)) {
      g.fillStyle = tones[letter];
      for (let r = 0; r < count; r++) if (cells[r] === letter && places[r]) g.fillRect(places[r][0], places[r][1], size, size);
    }
    const out = size < 10 ? 4 : 0;  // among thousands it must still be seen
    for (const [r, letter] of odd(out)) if (places[r]) {
      g.fillStyle = css("--back"); g.fillRect(places[r][0] - out - 2, places[r][1] - out - 2, size + 2 * out + 4, size + 2 * out + 4);
      g.fillStyle = tones[letter]; g.fillRect(places[r][0] - out, places[r][1] - out, size + 2 * out, size + 2 * out);
    }
    legend();
  }
  function legend() {
    const counts = {};
    [...cells].forEach((c, r) => { const k = guilty.has(r) ? "g" : c; counts[k] = (counts[k] || 0) + 1; });
    const box = document.getElementById("cell-legend"), key = JSON.stringify(counts);
    if (box.dataset.key === key) return;
    box.dataset.key = key;
    box.replaceChildren(...Object.keys(NAMES).filter((k) => counts[k]).map((k) => {
      const item = document.createElement("span"), box = document.createElement("i");
      box.style.background = `var(${TONES[k]})`; item.append(box, `${counts[k].toLocaleString("en")} ${NAMES[k]}`);
      return item;
    }));
  }
  function at(event) {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    for (let r = 0; r < places.length; r++) { const p = places[r]; if (p && x >= p[0] - 1 && x < p[0] + size + 1 && y >= p[1] - 1 && y < p[1] + size + 1) return r; }
    return -1;
  }
  return {
    start(pick) {
      canvas = document.getElementById("grid"); tip = document.getElementById("cell-tip"); onPick = pick;
      canvas.addEventListener("mousemove", (event) => {
        const rank = at(event);
        tip.hidden = rank < 0;
        if (rank < 0) return;
        const node = nodeOf.get(rank);
        tip.textContent = `${names.get(rank) || `${word} ${rank}`}: ${NAMES[guilty.has(rank) ? "g" : cells[rank]] || ""}${node ? ", " + node : ""}`;
        const box = canvas.parentElement.getBoundingClientRect();
        tip.style.left = Math.min(event.clientX - box.left + 12, Math.max(0, box.width - tip.offsetWidth)) + "px"; tip.style.top = event.clientY - box.top + 14 + "px";
      });
      canvas.addEventListener("mouseleave", () => { tip.hidden = true; });
      canvas.addEventListener("click", (event) => { const rank = at(event); if (rank >= 0) onPick(rank); });
      document.getElementById("by").addEventListener("change", (event) => { by = event.target.value; draw(); });
      new ResizeObserver(() => draw()).observe(canvas.parentElement);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    },
    place(found) {
      layout = found; nodeOf = new Map(); names = new Map();
      for (const node of layout.nodes) node.ranks.forEach((rank, at) => { nodeOf.set(rank, node.node); if (node.names[at]) names.set(rank, node.names[at]); });
      const select = document.getElementById("by"), ways = [...names.size ? ["role"] : [], "node", ...kinds().keys()];
      select.hidden = ways.length < 2;
      if (select.dataset.key !== ways.join()) { select.dataset.key = ways.join(); select.replaceChildren(...ways.map((name) => new Option("by " + name, name, false, name === by))); }
      draw();
    },
    show(letters, named, name) {
      const key = letters + "/" + named.join() + name;
      if (key === drawn) return;
      drawn = key; cells = letters; guilty = new Set(named); word = name;
      draw();
    },
    node: (rank) => nodeOf.get(rank),
    name: (rank) => names.get(rank) || `Rank ${rank}`,
    placeOf: (rank) => places[rank],
  };
})();
