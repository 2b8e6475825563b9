// Parameters: heat map of update ratios with zoom, search and order; history of one parameter.
distmon.MOST_ROWS = 240;

distmon.heatLevels = function (view, rows, from, to) {
  // Rows of the heat map between two places; neighbors share a row where there are too many.
  const grid = distmon.grid(view.params.grids.update_ratio);
  const size = Math.max(1, Math.ceil((to - from) / distmon.MOST_ROWS));
  const middle = distmon.middleRatio(view);
  const y = [], z = [], special = [], raw = [], labels = [];
  for (let start = from; start < to; start += size) {
    const end = Math.min(to, start + size);
    const levels = [], marks = [], shown = [];
    for (let column = 0; column < grid.steps.length; column++) {
      let value = NaN, far = -1, zeros = 0, seen = 0, bad = false;
      for (let place = start; place < end; place++) {
        const each = distmon.at(grid, rows[place], column);
        if (Number.isNaN(each)) continue;
        seen++;
        if (!Number.isFinite(each)) { bad = true; continue; }
        if (each <= 0) { zeros++; continue; }
        const distance = Math.abs(Math.log10(each) - middle);
        if (distance > far) { far = distance; value = each; }
      }
      const none = seen > 0 && zeros * 2 >= seen;
      levels.push(bad || none || !(value > 0) ? null : Math.log10(value));
      marks.push(bad ? 1 : none ? 0 : null);
      shown.push(bad ? "NaN or Inf" : none ? "0: no update" : distmon.number(value));
    }
    y.push((start + end - 1) / 2);
    z.push(levels); special.push(marks); raw.push(shown);
    const first = view.params.names[rows[start]];
    labels.push(end - start === 1 ? distmon.text(first) : `${end - start} parameters, farthest from the median<br>${distmon.text(first)}<br>to ${distmon.text(view.params.names[rows[end - 1]])}`);
  }
  return { y, z, special, raw, labels, steps: grid.steps, size };
};

distmon.middleRatio = function (view) {
  const grid = distmon.grid(view.params.grids.update_ratio);
  const sample = [];
  const stride = Math.max(1, Math.floor(grid.values.length / 4000));
  for (let i = 0; i < grid.values.length; i += stride) {
    if (grid.values[i] > 0 && Number.isFinite(grid.values[i])) sample.push(Math.log10(grid.values[i]));
  }
  sample.sort((a, b) => a - b);
  return sample.length ? sample[sample.length >> 1] : 0;
};

distmon.paramSection = function (getView) {
  const { el } = distmon;
  const state = { rows: [], from: 0, to: 0, order: "depth", limit: 12, words: "" };
  const names = () => getView().params.names;
  const lastColumn = (metric) => {
    const grid = distmon.grid(getView().params.grids[metric]);
    return (row) => (grid ? distmon.at(grid, row, grid.steps.length - 1) : NaN);
  };
  const orders = {
    depth: { label: "order of the model", by: null },
    high: { label: "largest update ratio first", by: "update_ratio", sign: -1 },
    low: { label: "smallest update ratio first", by: "update_ratio", sign: 1 },
    grad: { label: "largest gradient norm first", by: "grad_norm", sign: -1 },
  };
  const input = el("input", { type: "search", id: "param-search", placeholder: "attn weight", autocomplete: "off", oninput: () => select(input.value) });
  const choice = el("select", { id: "param-order", onchange: () => { state.order = choice.value; select(state.words); } },
    Object.entries(orders).map(([key, each]) => el("option", { value: key }, each.label)));
  const count = el("span", { class: "count", role: "status" });
  const reset = el("button", { type: "button", onclick: () => { input.value = ""; select(""); } }, "Show all");
  const controls = el("div", { class: "controls" }, el("label", { for: "param-search" }, "Search"), input,
    el("label", { for: "param-order" }, "Order"), choice, reset, count);
  const body = el("tbody");
  const more = el("button", { type: "button", onclick: () => { state.limit += 50; table(); } });
  const list = el("div", { class: "wide" }, el("table", { class: "params" },
    el("caption", {}, "Parameters; the numbers are those of the last column. Choose a name for its history."),
    el("thead", {}, el("tr", {}, ["parameter", "shape", "update ratio", "gradient norm", "weight norm"].map((each) => el("th", { scope: "col" }, each)))), body), more);
  const history = el("div", { class: "history", id: "param-history" });

  function select(words) {
    state.words = words;
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    state.rows = names().map((_, row) => row).filter((row) => wanted.every((word) => names()[row].toLowerCase().includes(word)));
    const order = orders[state.order];
    if (order.by) {
      const value = lastColumn(order.by);
      const key = (row) => (Number.isNaN(value(row)) ? Infinity : order.sign * value(row));
      state.rows.sort((a, b) => key(a) - key(b));
    }
    state.from = 0;
    state.to = state.rows.length;
    state.limit = 12;
    const total = getView().params.total;
    count.textContent = `${state.rows.length} of ${total} parameters` + (total > names().length ? ` (${names().length} are embedded)` : "");
    table();
    chart.refresh();
  }

  function table() {
    const [ratio, grad, weight] = ["update_ratio", "grad_norm", "weight_norm"].map(lastColumn);
    body.replaceChildren(...state.rows.slice(0, state.limit).map((row) => el("tr", {},
      el("th", { scope: "row" }, el("button", { type: "button", class: "link", onclick: () => open(row, true) }, names()[row])),
      el("td", {}, getView().params.shapes[row]),
      ...[ratio, grad, weight].map((value) => el("td", { class: "number" }, distmon.number(value(row)))))));
    const hidden = state.rows.length - state.limit;
    more.hidden = hidden <= 0;
    more.textContent = `Show ${Math.min(50, hidden)} more`;
  }

  function build(colors) {
    const view = getView();
    if (!names().length || !view.params.grids.update_ratio) return null;
    if (!state.rows.length) return state.words ? { ...empty(view, colors) } : null;
    const level = distmon.heatLevels(view, state.rows, state.from, state.to);
    const text = level.raw.map((row, i) => row.map((value) => `${level.labels[i]}<br>update ratio ${value}`));
    const common = { type: "heatmap", x: level.steps, y: level.y, text, hovertemplate: "%{text}<br>up to step %{x}<extra></extra>" };
    const values = level.z.flat().filter((each) => each !== null).sort((a, b) => a - b);
    const low = values.length ? Math.floor(values[Math.floor(values.length * 0.005)]) : -6;
    const high = values.length ? Math.ceil(values[Math.floor(values.length * 0.995)]) : 0;
    const ticks = [];
    for (let tick = low; tick <= high; tick += Math.max(1, Math.ceil((high - low) / 6))) ticks.push(tick);
    const traces = [
      { ...common, z: level.z, zmin: low, zmax: Math.max(high, low + 1), colorscale: "Viridis", colorbar: { thickness: 12, outlinewidth: 0, tickvals: ticks, ticktext: ticks.map((tick) => `1e${tick}`) } },
      { ...common, z: level.special, zmin: 0, zmax: 1, showscale: false, colorscale: [[0, colors.dark ? "#6b7480" : "#b9bfc7"], [1, "#D55E00"]] },
      ...distmon.alertTraces(view, colors, true),
    ];
    const labels = state.rows.map((row) => names()[row]);
    const pad = 0.5;
    const observed = Math.max(1, Math.round(view.params.observations / level.steps.length));
    return {
      traces,
      layout: distmon.layout(view, colors, { yaxis: { ...distmon.rowTicks(labels, state.from, state.to), range: [state.to - pad, state.from - pad] } }),
      note: "Size of the change of one step over size of the weight; first parameter of the model on top. Gray: no update at all; orange: NaN or Inf." +
        (level.size > 1 ? ` Each row is ${level.size} neighboring parameters; zoom in, search, or choose a row to separate them.` : " Choose a cell for the history of its parameter.") +
        (observed > 1 ? ` Each column is the mean of about ${observed} observations.` : ""),
    };
  }

  function empty(view, colors) {
    return { traces: [], layout: distmon.layout(view, colors), note: `No parameter has a name with "${state.words}".` };
  }

  function zoomed(change) {
    if (distmon.syncing) return;
    let range = null;
    if ("yaxis.range[0]" in change) range = [change["yaxis.range[0]"], change["yaxis.range[1]"]];
    else if (change["yaxis.autorange"] || change["yaxis.showspikes"]) range = [-0.5, state.rows.length - 0.5];
    if (!range) return;
    focus(Math.floor(Math.min(...range) + 0.5), Math.ceil(Math.max(...range) + 0.5));
  }

  function focus(from, to) {
    state.from = Math.max(0, Math.min(from, state.rows.length - 1));
    state.to = Math.min(state.rows.length, Math.max(to, state.from + 1));
    chart.refresh();
  }

  function click(point) {
    if (point.data.type !== "heatmap") return;
    const size = Math.max(1, Math.ceil((state.to - state.from) / distmon.MOST_ROWS));
    if (size === 1) open(state.rows[Math.round(point.y)], true);
    else focus(Math.floor(point.y - size * 4), Math.ceil(point.y + size * 4));
  }

  function open(row, scroll) {
    distmon.paramHistory(getView, row, history);
    if (scroll) {
      history.scrollIntoView({ behavior: "smooth", block: "nearest" });
      history.querySelector("h3").focus({ preventScroll: true });
    }
  }

  const chart = new distmon.Chart("Update ratio of every parameter",
    "No statistics of single parameters were recorded: the sink arrow was off, or nothing has been observed yet.",
    build, { height: 460, wide: true, controls, zoomed, click, view: getView, fit: () => Math.max(220, Math.min(520, 120 + 16 * (state.to - state.from))) });
  const has = names().length > 0;
  controls.hidden = list.hidden = !has;
  if (has) select("");
  const updated = () => { if (names().length) { controls.hidden = list.hidden = false; if (state.rows.length) { table(); chart.refresh(); } else select(state.words); } };
  return { nodes: [chart.node, list, history], updated, select: (words) => { input.value = words; select(words); }, open };
};

distmon.paramHistory = function (getView, row, place) {
  const { el } = distmon;
  (place.charts || []).forEach((chart) => chart.remove());
  const name = getView().params.names[row];
  const series = (metric) => {
    const params = getView().params;
    const at = params.detailed.indexOf(row);
    const grid = distmon.grid(at >= 0 && params.details[metric] ? params.details[metric] : params.grids[metric]);
    if (!grid) return null;
    const values = distmon.rowOf(grid, params.details[metric] && at >= 0 ? at : row);
    return { steps: grid.steps, values: values.map((v) => (Number.isFinite(v) ? v : null)) };
  };
  const plain = (specs, log) => (colors) => {
    const traces = specs.flatMap(([metric, label], index) => {
      const found = series(metric);
      const some = found && found.values.some((value) => value !== null);
      return some ? [distmon.line(label, found.steps, found.values, colors.lines[index], { line: { dash: ["solid", "dash", "dot"][index % 3] } })] : [];
    });
    if (!traces.length) return null;
    const view = getView();
    return { traces: [...traces, ...distmon.alertTraces(view, colors)], layout: distmon.layout(view, colors, { yaxis: { type: log ? "log" : "linear" } }) };
  };
  const percentiles = (colors) => {
    if (!getView().params.detailed.includes(row) || !series("grad_p50")) return null;
    const [blue, orange] = colors.lines;
    const of = (metric) => series(metric) || { steps: [], values: [] };
    const traces = [
      ...distmon.band(of("grad_p25").steps, of("grad_p25").values, of("grad_p75").values, blue),
      distmon.line("median", of("grad_p50").steps, of("grad_p50").values, blue),
      distmon.line("p95", of("grad_p95").steps, of("grad_p95").values, orange, { line: { dash: "dash" } }),
      distmon.line("p99", of("grad_p99").steps, of("grad_p99").values, colors.lines[2], { line: { dash: "dot" } }),
    ];
    for (const [metric, label] of [["grad_min", "min"], ["grad_max", "max"]]) {
      traces.push(distmon.line(label, of(metric).steps, of(metric).values, colors.lines[6], { line: { width: 1 }, trace: { visible: "legendonly" } }));
    }
    const view = getView();
    return { traces: [...traces, ...distmon.alertTraces(view, colors)], layout: distmon.layout(view, colors), note: "The band is from p25 to p75. Choose min and max in the legend to show them." };
  };
  const view = getView;
  const missing = () => (getView().params.detailed.includes(row) ? "No percentiles were recorded: the setting percentiles is off."
    : `Percentiles are embedded for ${getView().params.detailed.length} of ${getView().params.total} parameters; distmon report --param '${name}' embeds those of this one.`);
  place.charts = [
    new distmon.Chart("Update ratio", "The update ratio was not measured: the parameter is not trained.", plain([["update_ratio", "update ratio"], ["lr", "learning rate"]], true), { view }),
    new distmon.Chart("Norms", "No norm was measured.", plain([["grad_norm", "gradient"], ["weight_norm", "weight"]], true), { view }),
    new distmon.Chart("Gradient percentiles", missing, percentiles, { view }),
    new distmon.Chart("Lost to rounding, zeros in the gradient", missing, plain([["update_lost_fraction", "lost to rounding"], ["grad_zero_fraction", "zeros in the gradient"]], false), { view }),
  ];
  place.replaceChildren(el("h3", { tabindex: -1 }, name, " ", el("small", {}, getView().params.shapes[row])),
    el("div", { class: "charts" }, place.charts.map((chart) => chart.node)));
};
