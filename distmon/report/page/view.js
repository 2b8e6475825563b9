"use strict";
// The view of a run: decoding, formatting, and appending what is new.
const distmon = {};

distmon.el = function (tag, properties = {}, ...children) {
  // Strings become text nodes: names from logs are never markup.
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "class") node.className = value;
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
};

distmon.text = function (value) {
  // Plotly reads a few tags in its labels; this keeps them text.
  return String(value).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
};

distmon.wrap = function (value, width = 70) {
  const lines = [""];
  for (const word of String(value).split(" ")) {
    if (lines.at(-1).length + word.length > width && lines.at(-1)) lines.push("");
    lines[lines.length - 1] += (lines.at(-1) ? " " : "") + word.slice(0, 200);
  }
  return lines.slice(0, 12).map(distmon.text).join("<br>");
};

distmon.decode = function (text) {
  const binary = atob(text);
  const words = new Uint32Array(binary.length / 2);
  for (let i = 0; i < words.length; i++) {
    words[i] = (binary.charCodeAt(2 * i) | (binary.charCodeAt(2 * i + 1) << 8)) << 16;
  }
  return new Float32Array(words.buffer);
};

distmon.grid = function (encoded) {
  // Columns lie one after another, so that new ones are appended. Decoded when first used.
  if (!encoded) return null;
  if (!encoded.values) {
    encoded.values = distmon.decode(encoded.data);
    encoded.data = "";
  }
  return encoded;
};

distmon.at = (grid, row, column) => grid.values[column * grid.rows + row];

distmon.rowOf = function (grid, row) {
  return Array.from(grid.steps, (_, column) => distmon.at(grid, row, column));
};

distmon.known = function (steps, added) {
  // How many of the added steps are there already: a view may be newer than the first change.
  const last = steps.length ? steps.at(-1) : -Infinity;
  const first = added.findIndex((step) => step > last);
  return first < 0 ? added.length : first;
};

distmon.appendGrid = function (old, added) {
  if (!added) return old;
  if (!old) return added;
  const a = distmon.grid(old), b = distmon.grid(added);
  const skip = distmon.known(a.steps, b.steps);
  if (a.rows !== b.rows || skip === b.steps.length) return a;
  const more = b.values.subarray(skip * b.rows);
  const values = new Float32Array(a.values.length + more.length);
  values.set(a.values);
  values.set(more, a.values.length);
  return { ...a, values, steps: a.steps.concat(b.steps.slice(skip)), data: "" };
};

distmon.append = function (view, added) {
  // Appends the view of what is new; everything that is not a history is replaced.
  const cut = (more, skip, keys) => Object.fromEntries(keys.map((key) => [key, (more[key] || []).slice(skip)]));
  const join = (old, more) => { for (const key of Object.keys(more)) old[key] = (old[key] || []).concat(more[key]); };
  const count = view.scalars.steps.length;
  const skip = distmon.known(view.scalars.steps, added.scalars.steps);
  const fresh = added.scalars.steps.length - skip;
  join(view.scalars, cut(added.scalars, skip, ["steps", "times"]));
  view.scalars.observations += fresh;
  const tags = new Set([...Object.keys(view.scalars.values), ...Object.keys(added.scalars.values)]);
  for (const tag of tags) {
    const before = view.scalars.values[tag] || Array(count).fill(null);
    const after = added.scalars.values[tag] ? added.scalars.values[tag].slice(skip) : Array(fresh).fill(null);
    view.scalars.values[tag] = before.concat(after);
  }
  const before = distmon.known(view.loss.steps, added.loss.steps);
  const bad = added.loss.bad.filter((step) => step > (view.loss.steps.at(-1) ?? -1));
  const losses = cut(added.loss, before, ["steps", "mean", "ema"]);
  if (view.loss.low.length) join(view.loss, { low: losses.mean, high: losses.mean });
  join(view.loss, { ...losses, bad });
  view.loss.bad_count += bad.length;
  for (const key of ["evaluations", "alerts", "faults"]) {
    const has = new Set(view[key].map((each) => JSON.stringify(each)));
    const news = added[key].filter((each) => !has.has(JSON.stringify(each)));
    view[key] = view[key].concat(news);
    if (key === "alerts") view.alert_count += news.length;
  }
  const done = distmon.known(view.tasks.steps, added.tasks.steps);
  const names = new Set([...Object.keys(view.tasks.values), ...Object.keys(added.tasks.values)]);
  for (const name of names) {
    const blank = (n) => Array(n).fill(null);
    view.tasks.values[name] = (view.tasks.values[name] || blank(view.tasks.steps.length)).concat(
      (added.tasks.values[name] || blank(added.tasks.steps.length)).slice(done));
  }
  view.tasks.steps = view.tasks.steps.concat(added.tasks.steps.slice(done));
  view.gain = distmon.appendGrid(view.gain, added.gain);
  for (const key of Object.keys(added.inside || {})) view.inside = { ...view.inside, [key]: distmon.appendGrid((view.inside || {})[key], added.inside[key]) };
  if (!view.ranks) view.ranks = added.ranks;
  else if (added.ranks) {
    for (const [metric, grid] of Object.entries(added.ranks.metrics)) {
      view.ranks.metrics[metric] = distmon.appendGrid(view.ranks.metrics[metric], grid);
    }
  }
  if (!view.params.names.length) view.params = added.params;
  else {
    for (const [metric, grid] of Object.entries(added.params.grids || {})) {
      view.params.grids[metric] = distmon.appendGrid(view.params.grids[metric], grid);
    }
    for (const [metric, grid] of Object.entries(added.params.details || {})) {
      view.params.details[metric] = distmon.appendGrid(view.params.details[metric], grid);
    }
  }
  for (const key of ["state", "time"]) view[key] = added[key];
  if (added.mfu_source) view.mfu_source = added.mfu_source;
};

distmon.count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

distmon.number = function (value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "not measured";
  if (!Number.isFinite(value)) return "not finite";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e15 || size < 1e-3) return value.toExponential(digits - 1);
  for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return `${Number((value / (unit === "k" ? 1e3 : limit)).toPrecision(digits))}${unit}`;
  }
  return String(Number(value.toPrecision(digits)));
};

distmon.lastIndex = function (view, tag) {
  // Where a metric has its last value; -1 without any.
  const values = view.scalars.values[tag] || [];
  let i = values.length - 1;
  while (i >= 0 && values[i] === null) i--;
  return i;
};

distmon.last = function (view, tag) {
  const at = distmon.lastIndex(view, tag);
  return at < 0 ? null : view.scalars.values[tag][at];
};

distmon.span = function (view) {
  // First and last step of everything that has a time axis.
  let low = Infinity, high = -Infinity;
  for (const steps of [view.scalars.steps, view.loss.steps]) {
    if (steps.length) { low = Math.min(low, steps[0]); high = Math.max(high, steps.at(-1)); }
  }
  for (const each of [...view.alerts, ...view.evaluations]) {
    low = Math.min(low, each.step); high = Math.max(high, each.step);
  }
  if (!Number.isFinite(low)) return [0, 1];
  const pad = Math.max(0.5, (high - low) * 0.01);
  return [low - pad, high + pad];
};
