// The page of one run: summary, alerts, charts, what was monitored.
distmon.cards = function (view) {
  const last = (tag) => distmon.last(view, tag);
  const share = (value) => (value === null ? null : `${Number((value * 100).toPrecision(2))}%`);
  const show = (value) => (value === null ? null : distmon.number(value));
  const attempts = view.about.attempts;
  const steps = [view.loss.steps.at(-1) ?? 0, view.scalars.steps.at(-1) ?? 0];
  const step = Math.max(...steps);
  const evaluated = view.evaluations.at(-1);
  // The last known value, and the step that it is of where the run has gone on without one.
  const newest = view.scalars.steps.at(-1);
  const age = (tag, otherwise = "") => {
    const at = distmon.lastIndex(view, tag);
    return at >= 0 && view.scalars.steps[at] !== newest ? `at step ${view.scalars.steps[at]}; not known since` : otherwise;
  };
  const bad = view.loss.bad.at(-1), good = view.loss.steps.filter((_, i) => view.loss.mean[i] !== null).at(-1) ?? -1;
  const loss = bad !== undefined && bad > good ? ["NaN or Inf", `since step ${view.loss.bad.find((each) => each > good)}`]
    : last("train/step_loss_ema") === null ? [null, ""]
      : [distmon.number(last("train/step_loss_ema"), 4), evaluated && evaluated.val_loss !== null ? `validation ${distmon.number(evaluated.val_loss, 4)}` : ""];
  const alerts = ["critical", "warning", "info"].map((each) => [each, view.alerts.filter((a) => a.severity === each).length]).filter(([, count]) => count);
  return [
    ["state", view.state.name, view.state.why],
    ["step", view.about.total_steps ? `${step} / ${view.about.total_steps}` : `${step}`, distmon.count(view.scalars.observations, "observation")],
    ["loss, averaged", ...loss],
    ["update ratio", show(last("monitor/update_ratio_median")), age("monitor/update_ratio_median", `median of ${view.params.total || view.about.parameters} parameters`)],
    ["gradient norm", show(last("monitor/grad_norm")), age("monitor/grad_norm")],
    ["tokens/s", show(last("performance/tokens_per_second")), last("performance/mfu") === null ? "" : `MFU ${share(last("performance/mfu"))}`],
    ["ranks", attempts.length ? `${attempts.at(-1).world_size}` : null, attempts.length > 1 ? `${attempts.length} attempts` : ""],
    ["alerts", `${view.alert_count}`, alerts.map(([name, count]) => `${count} ${name}`).join(", ")],
    ["monitor", share(last("performance/monitor_fraction")), "of the training time"],
  ].filter(([, value]) => value !== null);
};

distmon.alertList = function (view) {
  const { el } = distmon;
  if (!view.alerts.length) return [el("p", {}, "No rule has raised an alert.")];
  const sorted = [...view.alerts].reverse();
  const where = (alert) => [["parameters", alert.params], ["layers", alert.layers], ["ranks", alert.ranks]]
    .filter(([, items]) => items.length).map(([label, items]) => el("p", { class: "where" }, `${label}: ${items.join(", ")}`));
  const item = (alert) => el("li", { class: `alert ${alert.severity}` },
    el("p", { class: "head" }, el("span", { class: `badge ${alert.severity}` }, alert.severity), ` ${alert.rule} at step ${alert.step}`),
    el("p", {}, alert.message), where(alert),
    alert.advice.length ? el("details", { open: view.alerts.length <= 2 }, el("summary", {}, "What to do"), el("ol", {}, alert.advice.map((each) => el("li", {}, each)))) : null);
  const shown = el("ul", { class: "alerts" }, sorted.slice(0, 3).map(item));
  const nodes = [shown];
  if (sorted.length > 3) {
    const more = el("button", { type: "button", onclick: () => { shown.append(...sorted.slice(3).map(item)); more.remove(); } }, `Show ${sorted.length - 3} more alerts`);
    nodes.push(more);
  }
  if (view.alert_count > view.alerts.length) nodes.push(el("p", {}, `${view.alert_count - view.alerts.length} less severe alerts are not shown here; distmon show lists them.`));
  return nodes;
};

distmon.aboutNodes = function (view) {
  const { el } = distmon;
  const about = view.about;
  const table = (title, rows, open = false) => el("details", { open }, el("summary", {}, title), el("div", { class: "scroll" }, el("table", {}, el("tbody", {},
    rows.map((row) => el("tr", {}, el("th", { scope: "row" }, row[0]), row.slice(1).map((cell) => el("td", {}, cell ?? "")))))))); 
  const cost = ["performance/monitor_seconds", "performance/monitor_fraction", "performance/monitor_bytes", "performance/monitor_collectives", "performance/interval"]
    .map((tag) => [tag.split("/")[1].replaceAll("_", " "), distmon.last(view, tag)]).filter(([, value]) => value !== null).map(([name, value]) => [name, distmon.number(value)]);
  const nodes = [];
  if (about.reading) nodes.push(el("p", {}, `Read: ${about.reading}` + (about.sampled ? ` (${distmon.number(about.sampled)} of ${distmon.number(about.elements)} elements sampled).` : ".")));
  nodes.push(table("Attempts", about.attempts.map((each) => [`attempt ${each.attempt}`, each.started || "", each.resumed_from ? `resumed from step ${each.resumed_from}` : "from the start", distmon.count(each.world_size, "rank")]), true));
  if (cost.length) nodes.push(table("Cost of the monitor at the last observation", cost, true));
  nodes.push(table("Versions", about.versions), table("Settings", about.settings));
  if (view.faults.length) nodes.push(table(`Faults of the monitor (${view.faults.length})`, view.faults.map((each) => [`step ${each.step}`, each.text]), true));
  if (view.problems.length) nodes.push(el("p", { class: "problem" }, `Parts of the folder could not be read: ${view.problems.join("; ")}.`));
  return nodes;
};

distmon.runPage = function (view, main) {
  const { el } = distmon;
  const get = () => view;
  const charts = (...nodes) => el("div", { class: "charts" }, ...nodes);
  const chart = (title, empty, build, options = {}) => new distmon.Chart(title, empty, build, { view: get, ...options }).node;
  const lines = (specs, layout, note) => (colors) => distmon.lines(view, specs, colors, layout, note && note());
  const section = (id, title, ...nodes) => el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), ...nodes);
  const log = { yaxis: { type: "log" } };

  const cards = el("dl", { class: "cards" });
  const alerts = el("div");
  const about = el("div");
  const logBox = el("input", { type: "checkbox", id: "log-loss", onchange: () => { distmon.logLoss = logBox.checked; distmon.refresh(); } });
  const metric = el("select", { id: "rank-metric", onchange: () => distmon.refresh() });
  const params = distmon.paramSection(get);
  let shownAlerts = -1;
  const mfuNote = () => (view.mfu_source ? `MFU from: ${view.mfu_source}` : "");

  const fill = () => {
    cards.replaceChildren(...distmon.cards(view).map(([name, value, small]) => el("div", { class: name === "state" ? `card state-${value}` : "card" }, el("dt", {}, name), el("dd", {}, value), el("dd", { class: "small" }, small))));
    if (shownAlerts !== view.alert_count) alerts.replaceChildren(...distmon.alertList(view));
    shownAlerts = view.alert_count;
    const open = [...about.querySelectorAll("details[open] > summary")].map((each) => each.textContent);
    about.replaceChildren(...distmon.aboutNodes(view));
    about.querySelectorAll("summary").forEach((each) => { if (open.includes(each.textContent)) each.parentNode.open = true; });
    const chosen = metric.value;
    metric.replaceChildren(...Object.keys(view.ranks ? view.ranks.metrics : {}).map((each) => el("option", { value: each }, distmon.rankMetrics[each] || each.replace("_seconds", " (s)"))));
    if (chosen) metric.value = chosen;
    else if (view.alerts.some((alert) => alert.rule === "straggler") && view.ranks) metric.value = distmon.unevenMetric(view);
  };

  const sections = [
    section("summary", "Summary", cards),
    section("alerts", "Alerts", alerts),
    section("training", "Training", charts(
      chart("Loss", "No loss was reported: pass it to monitor.step(loss=...).", (colors) => distmon.lossChart(view, colors),
        { wide: true, height: 330, controls: el("div", { class: "controls" }, logBox, el("label", { for: "log-loss" }, "logarithmic")) }),
      chart("Gradient norm and clipping", "No gradient norm was measured.", (colors) => distmon.normChart(view, colors, "monitor/grad_norm", "monitor/grad_norm_stderr", "before clipping", [["monitor/applied_grad_norm", "as applied"]])),
      chart("Learning rate", "No learning rate was recorded.", lines([["train/lr", "learning rate"]], { yaxis: { rangemode: "tozero" } })))),
    section("updates", "Updates", charts(
      chart("Update ratio over parameters", "No update was measured.", lines([["monitor/update_ratio_median", "median"], ["monitor/update_ratio_p95", "p95"], ["monitor/update_ratio_max", "max"], ["monitor/update_ratio_min", "min"]], log)),
      chart("Frozen parameters", "Nothing was measured.", lines([["monitor/frozen_count", "trainable parameters without any update"]], { yaxis: { rangemode: "tozero" } })),
      ...params.nodes)),
    section("gradients", "Gradient gain and weights", charts(
      chart("Gradient gain by depth", "No gain was measured: the model has no repeated blocks, or flow.enabled is off.", (colors) => distmon.gainChart(view, colors), { height: 300 }),
      chart("Norm of all weights", "No weights were measured.", (colors) => distmon.normChart(view, colors, "monitor/param_norm", "monitor/param_norm_stderr", "weights")),
      chart("Updates lost to rounding", "Nothing was measured.", lines([["monitor/update_lost_fraction", "unmoved elements with a gradient, %", 100]], { yaxis: { rangemode: "tozero" } })),
      ...(view.tasks.steps.length ? [chart("Gradient norm of each task", "No task losses were reported.", (colors) => distmon.taskChart(view, colors))] : []))),
    ...(view.inside ? [section("inside", "Inside the model", charts(
      ...Object.keys(view.inside).map((key) => chart(key.replace("/", ": ").replaceAll("_", " "), "Nothing was measured.", (colors) => distmon.insideChart(view, colors, key), { height: 280 }))))] : []),
    section("speed", "Speed and devices", charts(
      chart("Where a step's time goes, ms", "No phases were measured.", (colors) => distmon.phaseChart(view, colors)),
      chart("Tokens per second", "No tokens were reported: pass them to monitor.step(tokens=...).", lines([["performance/tokens_per_second", "tokens/s"]], { yaxis: { rangemode: "tozero", exponentformat: "SI" } })),
      chart("MFU", "No MFU: the FLOPs per token or the peak of the device are unknown. See docs/mfu.md.", lines([["performance/mfu", "MFU, %", 100]], { yaxis: { rangemode: "tozero" } }, mfuNote)),
      chart("Memory", "No memory was measured.", lines([["memory/allocated_bytes", "allocated, GB", 1e-9], ["memory/reserved_bytes", "reserved, GB", 1e-9], ["memory/peak_bytes", "peak, GB", 1e-9], ["memory/rss_bytes", "host, GB", 1e-9]], { yaxis: { rangemode: "tozero" } }, () => "Of the rank with the most.")),
      chart("Devices", "No device was read: there is no GPU, or its driver does not answer.", lines([["hardware/utilization", "utilization, %", 100], ["hardware/temperature", "temperature, C"], ["hardware/memory_fraction", "memory in use, %", 100]])),
      chart("Time of the monitor itself", "Not measured.", lines([["performance/monitor_fraction", "share of the training time, %", 100]], { yaxis: { rangemode: "tozero" } })))),
    section("ranks", "Ranks", charts(chart("Ranks over time", "No telemetry of single ranks was recorded.", (colors) => distmon.rankChart(view, colors, metric.value),
      { wide: true, height: 320, controls: el("div", { class: "controls" }, el("label", { for: "rank-metric" }, "Show"), metric) }))),
    section("about", "What was monitored, and how", about),
  ];
  fill();
  main.replaceChildren(...sections);
  const heading = document.getElementById("run-name");
  heading.textContent = view.name;
  document.title = `${view.name} - distmon`;
  const nav = document.getElementById("sections");
  nav.replaceChildren(...sections.map((each) => el("a", { href: `#${each.id}` }, each.querySelector("h2").textContent)));
  return {
    add(added) { distmon.append(view, added); fill(); params.updated(); distmon.refresh(); },
    params, fill,
  };
};

distmon.taskChart = function (view, colors) {
  const traces = Object.entries(view.tasks.values).map(([name, values], index) => distmon.line(distmon.text(name), view.tasks.steps, values, colors.lines[index % colors.lines.length]));
  return traces.length ? { traces: [...traces, ...distmon.alertTraces(view, colors)], layout: distmon.layout(view, colors, { yaxis: { type: "log" } }) } : null;
};

distmon.theme = function () {
  const stored = () => { try { return localStorage.getItem("distmon-theme"); } catch { return null; } };
  const system = matchMedia("(prefers-color-scheme: dark)");
  const set = (name) => { document.documentElement.dataset.theme = name; distmon.refresh(); };
  set(stored() || (system.matches ? "dark" : "light"));
  system.addEventListener("change", () => { if (!stored()) set(system.matches ? "dark" : "light"); });
  document.getElementById("theme").addEventListener("click", () => {
    const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("distmon-theme", name); } catch { /* a file may not store anything */ }
    set(name);
  });
};
