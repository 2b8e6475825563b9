// Charts: theme, time axis shared by all, alerts and attempts on it, keys.
distmon.charts = [];
distmon.range = null; // of the shared time axis; null for the whole run

distmon.colors = function () {
  const dark = document.documentElement.dataset.theme === "dark";
  // Okabe and Ito's colors, lighter on a dark ground: every kind of color vision tells them apart.
  return {
    dark,
    text: dark ? "#e6e8eb" : "#1c2126",
    faint: dark ? "#a3abb5" : "#58626d",
    grid: dark ? "#343a41" : "#e3e6ea",
    ground: dark ? "#1b1f24" : "#ffffff",
    lines: dark
      ? ["#56B4E9", "#E69F00", "#2fc79b", "#ff8c4a", "#e59ac4", "#F0E442", "#b8c0ca"]
      : ["#0072B2", "#D55E00", "#009E73", "#8a5a00", "#a8447f", "#56B4E9", "#5c6670"],
    severity: dark
      ? { info: "#56B4E9", warning: "#E69F00", critical: "#ff7b54" }
      : { info: "#0072B2", warning: "#B87A00", critical: "#C0390B" },
  };
};

distmon.translucent = function (color, share) {
  const part = (at) => parseInt(color.slice(at, at + 2), 16);
  return `rgba(${part(1)},${part(3)},${part(5)},${share})`;
};

distmon.severities = {
  info: { symbol: "circle", dash: "dot" },
  warning: { symbol: "triangle-up", dash: "dash" },
  critical: { symbol: "x", dash: "solid" },
};

distmon.alertTraces = function (view, colors, overHeatMap = false) {
  const traces = [];
  for (const [severity, look] of Object.entries(distmon.severities)) {
    const alerts = view.alerts.filter((alert) => alert.severity === severity);
    if (!alerts.length) continue;
    const color = colors.severity[severity];
    const common = { yaxis: "y9", showlegend: false, type: "scatter" };
    const shown = alerts.slice(-150);
    traces.push({
      ...common, mode: "lines", hoverinfo: "skip",
      x: shown.flatMap((alert) => [alert.step, alert.step, null]),
      y: shown.flatMap(() => [0, 1, null]),
      line: { color: overHeatMap ? "rgba(255,255,255,0.75)" : distmon.translucent(color, 0.55), width: 1, dash: look.dash },
    });
    traces.push({
      ...common, mode: "markers", hoverinfo: "text",
      x: shown.map((alert) => alert.step), y: shown.map(() => 0.97),
      text: shown.map((alert) =>
        `<b>${severity}</b> ${distmon.text(alert.rule)}, step ${alert.step}<br>${distmon.wrap(alert.message)}`),
      marker: { color, symbol: look.symbol, size: overHeatMap ? 11 : 9, line: { color: overHeatMap ? "#ffffff" : colors.ground, width: overHeatMap ? 2 : 1 } },
    });
  }
  return traces;
};

distmon.attemptMarks = function (view, colors) {
  const attempts = view.about.attempts.filter((each) => each.resumed_from > 0).slice(-30);
  return {
    shapes: attempts.map((each) => ({
      type: "line", xref: "x", yref: "paper", x0: each.resumed_from, x1: each.resumed_from, y0: 0, y1: 1,
      line: { color: colors.faint, width: 1.5, dash: "longdash" },
    })),
    annotations: attempts.map((each) => ({
      x: each.resumed_from, xref: "x", y: 1, yref: "paper", yanchor: "bottom", showarrow: false,
      text: `resumed from ${each.resumed_from}`, font: { size: 10, color: colors.faint },
    })),
  };
};

distmon.layout = function (view, colors, extra = {}) {
  const axis = { gridcolor: colors.grid, zerolinecolor: colors.grid, linecolor: colors.grid, automargin: true, exponentformat: "e" };
  const marks = view ? distmon.attemptMarks(view, colors) : { shapes: [], annotations: [] };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colors.text, size: 12, family: "system-ui, sans-serif" },
    margin: { l: 58, r: 18, t: marks.shapes.length ? 26 : 10, b: 40 }, hovermode: "closest", dragmode: "zoom",
    hoverlabel: { bgcolor: colors.ground, bordercolor: colors.faint, font: { color: colors.text }, align: "left", namelength: -1 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colors.faint, activecolor: colors.text },
    legend: { orientation: "h", x: 0, y: -0.2, yanchor: "top", font: { size: 11 } },
    ...marks, ...extra,
    xaxis: { ...axis, exponentformat: "SI", title: { text: "step", standoff: 4, font: { size: 11 } }, range: distmon.range || (view ? distmon.span(view) : undefined), ...(extra.xaxis || {}) },
    // On a logarithmic axis more ticks would be digits on top of each other.
    yaxis: { ...axis, ...((extra.yaxis || {}).type === "log" ? { nticks: 4 } : {}), ...(extra.yaxis || {}) },
    yaxis9: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
  };
};

distmon.config = {
  responsive: true, displaylogo: false, showTips: false,
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
};

distmon.Chart = class {
  // `build(colors)` returns {traces, layout}, or null where there is nothing to draw.
  constructor(title, empty, build, options = {}) {
    this.build = build;
    this.empty = empty;
    this.options = { height: 270, time: true, ...options };
    this.plot = distmon.el("div", { class: "plot", tabindex: 0, role: "group", "aria-label": `${title}. Arrow keys pan, plus and minus zoom, 0 shows everything.` });
    this.plot.style.height = `${this.options.height}px`;
    this.note = distmon.el("p", { class: "note" });
    this.node = distmon.el("figure", { class: this.options.wide ? "chart wide" : "chart" },
      distmon.el("figcaption", {}, title), this.options.controls || null, this.plot, this.note);
    this.title = title;
    this.visible = false;
    this.drawn = false;
    this.plot.addEventListener("keydown", (event) => this.key(event));
    distmon.charts.push(this);
    distmon.watcher.observe(this.node);
  }

  remove() {
    distmon.watcher.unobserve(this.node);
    this.visible = false;
    distmon.charts = distmon.charts.filter((each) => each !== this);
    if (this.drawn) Plotly.purge(this.plot);
    this.node.remove();
  }

  refresh() {
    if (!this.visible) { this.stale = true; return; }
    this.stale = false;
    const built = this.build(distmon.colors());
    this.note.textContent = (built && built.note) || "";
    if (!built) {
      if (this.drawn) Plotly.purge(this.plot);
      this.drawn = false;
      this.plot.classList.add("empty");
      this.plot.removeAttribute("tabindex");
      this.plot.textContent = typeof this.empty === "function" ? this.empty() : this.empty;
      return;
    }
    if (!this.drawn) { this.plot.textContent = ""; this.plot.classList.remove("empty"); this.plot.tabIndex = 0; }
    if (this.options.fit) {
      built.layout.height = this.options.fit();
      this.plot.style.height = `${built.layout.height}px`;
    }
    Plotly.react(this.plot, built.traces, built.layout, distmon.config);
    if (!this.drawn) {
      this.drawn = true;
      this.plot.on("plotly_relayout", (change) => this.moved(change));
      this.plot.on("plotly_click", (event) => this.options.click && this.options.click(event.points[0]));
    }
  }

  moved(change) {
    if (this.options.zoomed) this.options.zoomed(change);
    if (!this.options.time || distmon.syncing) return;
    if ("xaxis.range[0]" in change) distmon.show([change["xaxis.range[0]"], change["xaxis.range[1]"]], this);
    else if (change["xaxis.autorange"]) distmon.show(null);
  }

  key(event) {
    if (!this.drawn || !this.options.time || event.ctrlKey || event.metaKey || event.altKey) return;
    const [low, high] = this.plot.layout.xaxis.range.map(Number);
    const width = high - low;
    const moves = {
      ArrowLeft: [low - width / 5, high - width / 5], ArrowRight: [low + width / 5, high + width / 5],
      "+": [low + width / 5, high - width / 5], "=": [low + width / 5, high - width / 5],
      "-": [low - width / 3, high + width / 3], 0: null,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    distmon.show(moves[event.key]);
  }
};

distmon.show = function (range, except = null) {
  // Shows the same steps in every chart.
  distmon.range = range;
  distmon.syncing = true;
  const done = [];
  for (const chart of distmon.charts) {
    if (!chart.options.time || chart === except) continue;
    if (chart.drawn && chart.visible) {
      done.push(Plotly.relayout(chart.plot, { "xaxis.range": range || distmon.span(chart.options.view()) }));
    } else chart.stale = true;
  }
  Promise.allSettled(done).then(() => { distmon.syncing = false; });
};

distmon.refresh = () => distmon.charts.forEach((chart) => chart.refresh());

// One chart at a time, so that the first one is seen before the next ones are drawn.
distmon.waiting = [];

distmon.drawSoon = function (chart) {
  if (distmon.waiting.includes(chart)) return;
  distmon.waiting.push(chart);
  if (distmon.waiting.length === 1) setTimeout(distmon.drawNext);
};

distmon.drawNext = function () {
  const chart = distmon.waiting[0];
  try {
    if (chart.visible && (!chart.drawn || chart.stale)) chart.refresh();
  } finally {
    distmon.waiting.shift();
    if (distmon.waiting.length) setTimeout(distmon.drawNext);
  }
};

// Charts are drawn when they come near the window.
// Plots are drawn when they come into the window; paper shows all of them.
window.addEventListener("beforeprint", () => {
  for (const chart of distmon.charts) { chart.visible = true; chart.refresh(); }
});

distmon.watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = distmon.charts.find((each) => each.node === entry.target);
    if (!chart) continue;
    chart.visible = entry.isIntersecting;
    if (chart.visible && (!chart.drawn || chart.stale)) distmon.drawSoon(chart);
  }
}, { rootMargin: "300px" });

addEventListener("beforeprint", () => distmon.charts.forEach((chart) => { chart.visible = true; chart.refresh(); }));
