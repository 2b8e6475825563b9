// Several runs in one plot, and what compare says about them.
distmon.runColor = (colors, index) => colors.lines[index % colors.lines.length];
distmon.dashes = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];

distmon.overlayCharts = function (getOverlay, place) {
  const chart = (title, index) => new distmon.Chart(title, `No run has ${title.toLowerCase()}.`, (colors) => {
    const overlay = getOverlay();
    const lines = overlay.plots[index].lines;
    const traces = lines.flatMap((line, run) => (line.x.length ? [distmon.line(distmon.text(overlay.runs[run]), line.x, line.y, distmon.runColor(colors, run),
      { line: { dash: distmon.dashes[Math.floor(run / colors.lines.length + run) % distmon.dashes.length], width: 1.5 } })] : []));
    if (!traces.length) return null;
    const log = /norm|ratio/i.test(title);
    const layout = distmon.layout(null, colors, { showlegend: true, yaxis: { type: log ? "log" : "linear", rangemode: /loss/i.test(title) ? "normal" : "tozero" }, xaxis: { title: { text: overlay.axis === "tokens" ? "tokens" : "step", standoff: 4, font: { size: 11 } }, ...(distmon.range ? { range: distmon.range } : { autorange: true }) } });
    return { traces, layout };
  }, { time: false, height: 300, wide: title === "Loss" });
  const made = getOverlay().plots.map((plot, index) => chart(plot.title, index));
  place.replaceChildren(...made.map((each) => each.node));
  return made;
};

distmon.verdictTable = function (comparison) {
  const { el } = distmon;
  const percent = (value) => `${value >= 0 ? "+" : ""}${Number((100 * value).toPrecision(3))}%`;
  const between = (interval) => (interval ? `${percent(interval[0])} to ${percent(interval[1])}` : "");
  return el("table", {}, el("caption", {}, `${comparison.other} against ${comparison.first}, at equal ${comparison.equal}; the interval is that of the change, by block bootstrap.`),
    el("thead", {}, el("tr", {}, ["quantity", "first", "other", "change", "interval", "verdict"].map((each) => el("th", { scope: "col" }, each)))),
    el("tbody", {}, comparison.quantities.map((each) => el("tr", {}, el("th", { scope: "row" }, each.name), el("td", {}, distmon.number(each.first, 4)), el("td", {}, distmon.number(each.other, 4)),
      el("td", {}, percent(each.change)), el("td", {}, between(each.interval)), el("td", { class: `verdict ${each.verdict.replaceAll(" ", "-")}` }, each.verdict)))));
};

distmon.comparisonNodes = function (comparison) {
  const { el } = distmon;
  const table = (caption, head, rows) => (rows.length ? el("div", { class: "scroll" }, el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, head.map((each) => el("th", { scope: "col" }, each)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, cell))))))) : el("p", {}, `${caption}: none.`));
  const alerts = Object.entries(comparison.alerts).flatMap(([run, found]) => found.map((each) => [run, each.severity, each.rule, `${each.count}`, `${each.first_step}`]));
  return [
    el("h3", {}, `${comparison.other} against ${comparison.first}`), distmon.verdictTable(comparison),
    table("What differs", ["kind", "what", "first", "other"], comparison.differences.map((each) => [each.kind, each.what, each.first, each.other])),
    table("Parameters that differ most in the second half", ["parameter", "statistic", "factor", "first", "other"],
      comparison.params.map((each) => [each.name, each.metric, `x${distmon.number(each.factor)}`, distmon.number(each.first), distmon.number(each.other)])),
    table("Alerts of each", ["run", "severity", "rule", "count", "first step"], alerts),
  ];
};
