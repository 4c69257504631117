// The history of a job: charts one below the other on one time axis, drawn by uPlot (uplot.js).
const Charts = (function () {
  const PANELS = [
    { title: "Step time", unit: "s", series: [["step_p50_s", "median of the ranks", "--accent"], ["step_p99_s", "99th percentile", "--warn"]] },
    { title: "Steps per second", unit: "/s", series: [["steps_per_s", "", "--accent"]] },
    { title: "Tokens per second", unit: "/s", series: [["tokens_per_s", "tokens of all ranks", "--accent"]] },
    { title: "Calls per second", unit: "/s", series: [["calls_per_s", "calls of all ranks", "--accent"]] },
    { title: "Loss", unit: "", series: [["loss", "", "--accent"]], free: true },
    { title: "Alive", unit: "", series: [["alive", "", "--good"], ["total", "of", "--soft"]], steps: true },
  ];
  const TIER_S = { 900: 1, 10800: 10, 86400: 60 };
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const show = (v) => v === null || v === undefined || Number.isNaN(v) ? "–" : Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : Math.abs(v) >= 100 ? v.toFixed(0) : Math.abs(v) >= 1 || v === 0 ? String(+v.toFixed(2)) : v.toPrecision(3);
  const seconds = (v) => v === null || v === undefined ? "–" : v === 0 ? "0 s" : v < 0.001 ? (v * 1e6).toFixed(0) + " µs" : v < 1 ? +(v * 1e3).toPrecision(3) + " ms" : show(v) + " s";
  let data = { at: [] }, span = 900, zoomed = null, plots = [], incidents = [], box = null, clock = 0;

  function format(panel, v) { return panel.unit === "s" ? seconds(v) : show(v) + (v === null || v === undefined ? "" : panel.unit); }
  // a young job fills the width: its first minute was a sliver at the right
  function range() { return zoomed || [Math.max(clock - span, Math.min(data.at.length ? data.at[0] : clock, clock - 60)), clock]; }
  function used(panel) { return (data[panel.series[0][0]] || []).some((v) => v !== null && v !== undefined && (panel.title !== "Calls per second" || !(data.steps_per_s || []).some((s) => s !== null))); }
  function marks(u) {
    const { ctx, bbox } = u, dpr = devicePixelRatio || 1;
    ctx.save();
    ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
    for (const i of incidents) {
      const x = u.valToPos(i.at, "x", true), end = u.valToPos(i.closed ? i.at + i.took_s : clock, "x", true), tone = colour(i.closed ? "--warn" : "--bad");
      if (end < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.globalAlpha = 0.12; ctx.fillStyle = tone; ctx.fillRect(x, bbox.top, Math.max(1, end - x), bbox.height);
      ctx.globalAlpha = 1; ctx.fillRect(x, bbox.top, 1.5 * dpr, bbox.height);
    }
    ctx.restore();
  }
  function make(panel, last) {
    const holder = document.createElement("div"), head = document.createElement("p"), name = document.createElement("b"), values = document.createElement("span");
    holder.className = "chart"; head.className = "chart-head"; name.textContent = panel.title; values.className = "soft";
    head.append(name, " ", values); holder.append(head); box.append(holder);
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: '12px system-ui, "DejaVu Sans", sans-serif' };
    const label = (u) => {
      const i = u.cursor.idx ?? u.data[0].length - 1, at = u.cursor.idx === null || u.cursor.idx === undefined ? "" : new Date(u.data[0][i] * 1000).toLocaleTimeString("en-GB") + " · ";
      values.textContent = at + panel.series.map(([key, words], k) => `${words} ${format(panel, u.data[k + 1][i])}`.trim()).join(panel.steps ? " " : " · ");
    };
    const u = new uPlot({
      width: Math.max(200, holder.clientWidth), height: last ? 120 : 100, legend: { show: false }, padding: [8, 28, last ? 0 : 8, 0],
      cursor: { sync: { key: "history" }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
      scales: { x: { time: true, range: () => range() }, y: { range: (_, low, high) => panel.free ? (low === null ? [0, 1] : low === high ? [low - 1, high + 1] : [low, high]) : [0, high > 0 ? high * 1.08 : 1] } },
      axes: [{ ...axis, size: last ? 28 : 0, values: last ? (_, ticks) => ticks.map((t) => new Date(t * 1000).toLocaleTimeString("en-GB", range()[1] - range()[0] > 900 ? { hour: "2-digit", minute: "2-digit" } : {})) : () => [], space: 80 },
        { ...axis, size: 58, space: 26, values: (_, ticks) => ticks.map((t) => format({ unit: panel.unit === "s" ? "s" : "" }, t)) }],
      series: [{}, ...panel.series.map(([, , tone], k) => ({ stroke: colour(tone), width: 1.5, points: { show: false }, spanGaps: false, ...(k || panel.free ? {} : { fill: colour(tone) + "22" }), ...(panel.steps ? { paths: uPlot.paths.stepped({ align: 1 }) } : {}) }))],
      hooks: { draw: [marks], setCursor: [label], setSelect: [(plot) => { if (plot.select.width < 4) return; zoom([plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")]); plot.setSelect({ width: 0, left: 0 }, false); }] },
    }, columns(panel), holder);
    u.over.addEventListener("dblclick", () => zoom(null));
    label(u);
    return { panel, u, label };
  }
  function columns(panel) { return [data.at, ...panel.series.map(([key]) => data[key] || data.at.map(() => null))]; }
  function zoom(to) { zoomed = to; document.getElementById("zoom").hidden = !to; for (const p of plots) p.u.redraw(false, true), p.u.setData(p.u.data); }
  function rebuild() {
    if (!box) return;
    for (const p of plots) p.u.destroy();
    box.replaceChildren();
    const wanted = PANELS.filter(used);
    plots = data.at.length > 1 ? wanted.map((panel, i) => make(panel, i === wanted.length - 1)) : [];
    if (!plots.length) { const words = document.createElement("p"); words.className = "soft"; words.textContent = "Nothing to draw yet."; box.append(words); }
    box.dataset.panels = plots.map((p) => p.panel.title).join(",");
  }
  return {
    start(element) {
      box = element;
      let width = 0;
      new ResizeObserver(() => { if (box.clientWidth !== width) { width = box.clientWidth; for (const p of plots) p.u.setSize({ width: Math.max(200, width), height: p.u.height }); } }).observe(box);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", rebuild);
    },
    async load(seconds) {
      span = seconds; zoomed = null;
      document.getElementById("zoom").hidden = true;
      const answer = await fetch("/api/history?span=" + seconds);
      data = await answer.json();
      rebuild();
    },
    unzoom() { zoom(null); },
    push(row, list) {
      clock = Math.max(clock, row.at); incidents = list;
      const last = data.at.length ? data.at[data.at.length - 1] : 0;
      if (row.at - last >= TIER_S[span] * 0.9) {
        for (const key of Object.keys(row)) { (data[key] ||= new Array(data.at.length - (key === "at" ? 0 : 1)).fill(null)).push(row[key]); }
        while (data.at.length > 2 && data.at[0] < clock - span * 1.05) for (const key of Object.keys(data)) data[key].shift();
      }
      if (PANELS.filter(used).map((p) => p.title).join(",") !== (plots.length ? box.dataset.panels : "")) rebuild();
      else for (const p of plots) { p.u.setData(columns(p.panel)); p.label(p.u); }
    },
    shown: () => plots.map((p) => ({ title: p.panel.title, at: p.u.data[0], values: p.u.data[1], top: p.u.scales.y.max })),
  };
})();
