// The line charts and small heat maps of a run.
distmon.line = function (name, steps, values, color, extra = {}) {
  return {
    type: "scatter", mode: values.length < 60 ? "lines+markers" : "lines", name, x: steps, y: values, connectgaps: true,
    line: { color, width: 1.8, ...(extra.line || {}) }, marker: { size: 4, color },
    hovertemplate: `${name} %{y:.4~g}<br>step %{x}<extra></extra>`, ...extra.trace,
  };
};

distmon.band = function (steps, low, high, color) {
  const common = { type: "scatter", mode: "lines", hoverinfo: "skip", showlegend: false, x: steps, line: { width: 0 } };
  return [{ ...common, y: low }, { ...common, y: high, fill: "tonexty", fillcolor: distmon.translucent(color, 0.22) }];
};

distmon.lines = function (view, specs, colors, layout = {}, note = "") {
  // One line for each [tag, name, factor]; null when no metric has a value.
  const traces = [];
  specs.forEach(([tag, name, factor = 1], index) => {
    const values = view.scalars.values[tag];
    if (!values) return;
    const scaled = factor === 1 ? values : values.map((value) => (value === null ? null : value * factor));
    traces.push(distmon.line(name, view.scalars.steps, scaled, colors.lines[index % colors.lines.length],
      { line: { dash: ["solid", "dash", "dot", "dashdot"][index % 4] } }));
  });
  if (!traces.length) return null;
  return { traces: [...traces, ...distmon.alertTraces(view, colors)], layout: distmon.layout(view, colors, { showlegend: true, ...layout }), note };
};

distmon.lossChart = function (view, colors) {
  const loss = view.loss;
  if (!loss.steps.length && !view.evaluations.length) return null;
  const [blue, orange, green] = colors.lines;
  const traces = [];
  if (loss.low.length) traces.push(...distmon.band(loss.steps, loss.low, loss.high, blue));
  traces.push(distmon.line("loss", loss.steps, loss.mean, distmon.translucent(blue, 0.75), { line: { width: 1.2 }, trace: { mode: "lines" } }));
  traces.push(distmon.line("moving average", loss.steps, loss.ema, orange, { line: { width: 2.4 }, trace: { mode: "lines" } }));
  if (view.evaluations.length) {
    traces.push(distmon.line("validation", view.evaluations.map((e) => e.step), view.evaluations.map((e) => e.val_loss), green,
      { line: { dash: "dot" }, trace: { mode: "lines+markers", marker: { symbol: "diamond", size: 9, color: green } } }));
  }
  if (loss.bad.length) {
    traces.push({
      type: "scatter", mode: "markers", name: "not finite", x: loss.bad, y: loss.bad.map(() => 0.04), yaxis: "y9",
      marker: { symbol: "x", size: 9, color: colors.severity.critical }, hovertemplate: "loss is NaN or Inf<br>step %{x}<extra></extra>",
    });
  }
  const notes = [];
  if (loss.per_point > 1) notes.push(`Each point is the mean of about ${loss.per_point} steps, the band their lowest and highest.`);
  if (loss.bad_count) notes.push(`The loss was NaN or Inf at ${loss.bad_count} steps.`);
  return {
    traces: [...traces, ...distmon.alertTraces(view, colors)], note: notes.join(" "),
    layout: distmon.layout(view, colors, { yaxis: { type: distmon.logLoss ? "log" : "linear" } }),
  };
};

distmon.normChart = function (view, colors, tag, error, name, extra = []) {
  const values = view.scalars.values;
  const norm = values[tag];
  if (!norm) return null;
  const steps = view.scalars.steps, blue = colors.lines[0], traces = [];
  const errors = values[error] || [];
  let note = "";
  if (errors.some((each) => each > 0)) {
    const edge = (sign) => norm.map((v, i) => (v === null ? null : Math.max(v + sign * 2 * (errors[i] || 0), v / 1e3)));
    traces.push(...distmon.band(steps, edge(-1), edge(1), blue));
    note = "The band is two standard errors of the sample.";
  } else if (errors.length) note = "Read in full: no sampling error.";
  traces.push(distmon.line(name, steps, norm, blue));
  extra.forEach(([other, label], index) => {
    if (values[other]) traces.push(distmon.line(label, steps, values[other], colors.lines[index + 1], { line: { dash: "dash" } }));
  });
  return { traces: [...traces, ...distmon.alertTraces(view, colors)], layout: distmon.layout(view, colors, { yaxis: { type: "log" } }), note };
};

distmon.phaseChart = function (view, colors) {
  const phases = ["data", "forward", "backward", "communication", "optimizer", "other"];
  const values = view.scalars.values, seconds = values["performance/step_seconds"];
  if (!seconds) return null;
  const found = phases.filter((phase) => values[`performance/${phase}_fraction`]);
  if (!found.length) return null;
  const traces = found.map((phase) => {
    const color = colors.lines[phases.indexOf(phase)];
    const y = values[`performance/${phase}_fraction`].map((share, i) => (share === null || seconds[i] === null ? null : share * seconds[i] * 1e3));
    return {
      type: "scatter", mode: "lines", stackgroup: "one", name: phase, x: view.scalars.steps, y, line: { width: 0.8, color },
      fillcolor: distmon.translucent(color, 0.6), hovertemplate: `${phase} %{y:.3~g} ms<br>step %{x}<extra></extra>`,
    };
  });
  return { traces: [...traces, ...distmon.alertTraces(view, colors)], layout: distmon.layout(view, colors, { yaxis: { rangemode: "tozero" }, legend: { orientation: "h", x: 0, y: -0.2, yanchor: "top", font: { size: 11 }, traceorder: "normal" } }), note: "Mean over ranks." };
};

distmon.divergent = [[0, "#0b4f8a"], [0.25, "#56B4E9"], [0.5, "#f4f4f4"], [0.75, "#E69F00"], [1, "#8a3b00"]];

distmon.gainChart = function (view, colors) {
  const grid = distmon.grid(view.gain);
  if (!grid || !grid.steps.length) return null;
  const raw = grid.labels.map((_, row) => distmon.rowOf(grid, row));
  const z = raw.map((row) => row.map((gain) => (gain > 0 && Number.isFinite(gain) ? Math.log2(gain) : null)));
  const trace = {
    type: "heatmap", x: grid.steps, y: grid.labels.map((_, row) => row), z, customdata: raw, colorscale: distmon.divergent, zmin: -2, zmax: 2,
    text: raw.map((row, i) => row.map(() => distmon.text(grid.labels[i]))), hovertemplate: "%{text}<br>step %{x}<br>gain %{customdata:.3~g}<extra></extra>",
    colorbar: { tickvals: [-2, -1, 0, 1, 2], ticktext: ["≤ 1/4", "1/2", "1", "2", "≥ 4"], thickness: 12, outlinewidth: 0, title: { text: "gain", side: "top" } },
  };
  return {
    traces: [trace, ...distmon.alertTraces(view, colors, true)],
    layout: distmon.layout(view, colors, { yaxis: { ...distmon.rowTicks(grid.labels, 0, grid.labels.length, 14), autorange: "reversed" } }),
    note: "Norm of dL/d(input) over norm of dL/d(output) of each block, first block on top. Orange: the gradient grows on its way back; blue: it shrinks.",
  };
};

distmon.insideChart = function (view, colors, key) {
  const grid = view.inside && distmon.grid(view.inside[key]);
  if (!grid || !grid.steps.length) return null;
  const raw = grid.labels.map((_, row) => distmon.rowOf(grid, row));
  const share = /fraction|entropy|diversity|spread/.test(key);
  const z = raw.map((row) => row.map((v) => (!Number.isFinite(v) ? null : share ? v : v > 0 ? Math.log10(v) : null)));
  const trace = {
    type: "heatmap", x: grid.steps, y: grid.labels.map((_, row) => row), z, customdata: raw, colorscale: "Cividis", ...(share ? { zmin: 0, zmax: 1 } : {}),
    text: raw.map((row, i) => row.map(() => distmon.text(grid.labels[i]))), hovertemplate: "%{text}<br>step %{x}<br>%{customdata:.4~g}<extra></extra>",
    colorbar: { thickness: 12, outlinewidth: 0, ...(share ? { tickformat: ".0%" } : { tickprefix: "10^" }) },
  };
  return {
    traces: [trace, ...distmon.alertTraces(view, colors, true)],
    layout: distmon.layout(view, colors, { yaxis: { ...distmon.rowTicks(grid.labels, 0, grid.labels.length), autorange: "reversed" } }),
  };
};

distmon.rowTicks = function (labels, from, to, most = 28) {
  const stride = Math.max(1, Math.ceil((to - from) / most));
  const tickvals = [];
  for (let row = Math.ceil(from / stride) * stride; row < to; row += stride) tickvals.push(row);
  const short = (label) => (label.length > 34 ? `…${label.slice(-33)}` : label);
  return { tickmode: "array", tickvals, ticktext: tickvals.map((row) => distmon.text(short(labels[row] || ""))), tickfont: { size: 10 }, showgrid: false, zeroline: false };
};

distmon.rankMetrics = { step_seconds: "step time (s)", temperature_c: "temperature (C)", gpu_utilization: "GPU utilization", power_watts: "power (W)", sm_clock_mhz: "clock (MHz)", memory_used_bytes: "device memory (B)", allocated_bytes: "allocated (B)", rss_bytes: "host memory (B)", monitor_seconds: "monitor (s)" };

distmon.unevenMetric = function (view) {
  // The phase in which ranks differ most: that of the straggler, where there is one.
  let found = "step_seconds", most = 0;
  for (const [metric, encoded] of Object.entries(view.ranks.metrics)) {
    if (!/^(data|forward|backward|optimizer)_seconds$/.test(metric)) continue;
    const grid = distmon.grid(encoded);
    let sum = 0;
    for (let column = 0; column < grid.steps.length; column++) {
      const values = Array.from(grid.values.subarray(column * grid.rows, (column + 1) * grid.rows)).filter(Number.isFinite).sort((a, b) => a - b);
      if (values.length) sum += values.at(-1) - values[values.length >> 1];
    }
    if (sum > most) { most = sum; found = metric; }
  }
  return found;
};

distmon.rankChart = function (view, colors, metric) {
  const grid = view.ranks && distmon.grid(view.ranks.metrics[metric]);
  if (!grid || !grid.steps.length) return null;
  const labels = view.ranks.labels;
  const z = labels.map((_, row) => distmon.rowOf(grid, row).map((v) => (Number.isFinite(v) ? v : null)));
  // At least 20% to both sides of the middle: noise of a few percent must not look like an alarm.
  const finite = z.flat().filter((v) => v !== null).sort((a, b) => a - b);
  const middle = finite[finite.length >> 1] || 0, margin = 0.2 * Math.abs(middle);
  const range = finite.length ? { zmin: Math.min(finite[0], middle - margin), zmax: Math.max(finite.at(-1), middle + margin) } : {};
  const trace = {
    type: "heatmap", x: grid.steps, y: labels.map((_, row) => row), z, ...range, colorscale: "Cividis", colorbar: { thickness: 12, outlinewidth: 0, exponentformat: "SI" },
    text: z.map((row, i) => row.map(() => labels[i])), hovertemplate: "%{text}<br>step %{x}<br>%{z:.4~g}<extra></extra>",
  };
  const found = view.alerts.filter((alert) => alert.rule === "straggler").flatMap((alert) => alert.ranks.map((rank) => ({ alert, rank })));
  const marks = {
    type: "scatter", mode: "markers", showlegend: false, hoverinfo: "text", x: found.map((each) => each.alert.step),
    y: found.map((each) => Math.floor(each.rank / view.ranks.group)), text: found.map((each) => `<b>straggler</b> rank ${each.rank}<br>${distmon.wrap(each.alert.message)}`),
    marker: { symbol: "star", size: 13, color: "#ffffff", line: { color: "#000000", width: 1.5 } },
  };
  const notes = [];
  if (found.length) notes.push("A star marks a straggler when its alert was raised.");
  if (view.ranks.group > 1) notes.push(`Each row is the largest of ${view.ranks.group} ranks.`);
  return {
    traces: [trace, ...distmon.alertTraces(view, colors, true), marks], note: notes.join(" "),
    layout: distmon.layout(view, colors, { yaxis: { ...distmon.rowTicks(labels, 0, labels.length), autorange: "reversed" } }),
  };
};
