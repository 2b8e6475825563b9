// The live page: the list of runs, one run, or several overlaid. The address names which.
distmon.fetchJson = async function (path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
};

distmon.pageOf = (names) => `/?${names.map((name) => `run=${encodeURIComponent(name)}`).join("&")}`;

distmon.follow = function (views, onChange) {
  // One stream for all runs; after a break the browser asks again from the last change that came.
  const connect = () => {
    const query = [...views].map(([name, each]) => `run=${encodeURIComponent(name)}&after=${each.sequence}`).join("&");
    const source = new EventSource(`/api/events?${query}`);
    source.onmessage = (event) => {
      const change = JSON.parse(event.data);
      if (change.kind === "reload") { location.reload(); return; }
      const known = views.get(change.run);
      if (change.sequence <= known.sequence) return;
      known.sequence = change.sequence;
      onChange(change, known);
    };
    source.onerror = () => { source.close(); setTimeout(connect, 2000); };
  };
  connect();
};

distmon.runList = async function (main) {
  const { el } = distmon;
  const chosen = new Set();
  const body = el("tbody");
  const search = el("input", { type: "search", id: "run-search", oninput: () => fill() });
  const overlay = el("button", { type: "button", disabled: true, onclick: () => { location.href = distmon.pageOf([...chosen]); } }, "Overlay the chosen runs");
  const status = el("span", { class: "count", role: "status" });
  let runs = [];
  const ago = (time) => {
    if (!time) return "";
    const seconds = Date.now() / 1e3 - time;
    for (const [size, unit] of [[86400, "days"], [3600, "h"], [60, "min"]]) if (seconds >= size) return `${Math.round(seconds / size)} ${unit} ago`;
    return `${Math.max(0, Math.round(seconds))} s ago`;
  };
  const alerts = (counts) => Object.keys(distmon.severities).reverse().filter((each) => counts && counts[each]).map((severity) => [severity, counts[severity]]).flatMap(([severity, count]) => [el("span", { class: `badge ${severity}` }, `${count} ${severity}`), " "]);
  function fill() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = runs.filter((run) => words.every((word) => `${run.name} ${run.state}`.toLowerCase().includes(word)));
    status.textContent = runs.length ? `${shown.length} of ${runs.length} runs` : "There is no run in this folder yet.";
    body.replaceChildren(...shown.map((run) => {
      const box = el("input", { type: "checkbox", "aria-label": `choose ${run.name}`, onchange: () => {
        box.checked ? chosen.add(run.name) : chosen.delete(run.name);
        overlay.disabled = chosen.size < 2 || chosen.size > 8;
      } });
      box.checked = chosen.has(run.name);
      return el("tr", {}, el("td", {}, box), el("th", { scope: "row" }, el("a", { href: distmon.pageOf([run.name]) }, run.name)), el("td", {}, el("span", { class: `state ${run.state}` }, run.state), ` ${run.why}`),
        el("td", { class: "number" }, run.step ?? ""), el("td", { class: "number" }, run.loss === null || run.loss === undefined ? "" : distmon.number(run.loss, 4)), el("td", { class: "number" }, run.ranks ?? ""), el("td", {}, alerts(run.alerts)), el("td", {}, ago(run.time)));
    }));
  }
  async function load() {
    try { runs = await distmon.fetchJson("/api/runs"); fill(); } catch (error) { status.textContent = `cannot read the list of runs: ${error.message}`; }
  }
  document.getElementById("run-name").textContent = "Runs";
  status.textContent = "Reading the runs.";
  main.replaceChildren(el("div", { class: "controls" }, el("label", { for: "run-search" }, "Search"), search, overlay, status),
    el("table", { class: "runs" }, el("thead", {}, el("tr", {}, ["", "run", "state", "step", "loss", "ranks", "alerts", "last record"].map((each) => el("th", { scope: "col" }, each)))), body));
  await load();
  setInterval(load, 5000);
};

distmon.livePage = async function (names, main) {
  const { el } = distmon;
  const views = new Map();
  for (const name of names) views.set(name, await distmon.fetchJson(`/api/view?run=${encodeURIComponent(name)}`));
  const home = el("a", { href: "/" }, "All runs");
  if (names.length === 1) {
    const only = views.get(names[0]);
    const page = distmon.page = distmon.runPage(only.view, main);
    document.getElementById("sections").prepend(home);
    distmon.follow(views, (change, known) => {
      if (change.kind === "state") { known.view.state = change.data; page.fill(); } else page.add(change.data);
    });
    return;
  }
  const charts = el("div", { class: "charts" });
  main.replaceChildren(charts);
  document.getElementById("run-name").textContent = `${names.length} runs`;
  document.getElementById("sections").replaceChildren(home);
  const shown = [["Loss", null], ["Validation loss", null], ["Gradient norm", "monitor/grad_norm"], ["Median update ratio", "monitor/update_ratio_median"], ["Learning rate", "train/lr"], ["Tokens per second", "performance/tokens_per_second"], ["Seconds per step", "performance/step_seconds"]];
  const line = (title, tag, view) => {
    if (title === "Loss") return { x: view.loss.steps, y: view.loss.mean };
    if (title === "Validation loss") return { x: view.evaluations.map((e) => e.step), y: view.evaluations.map((e) => e.val_loss) };
    return view.scalars.values[tag] ? { x: view.scalars.steps, y: view.scalars.values[tag] } : { x: [], y: [] };
  };
  const build = () => ({ runs: names, axis: "steps", plots: shown.map(([title, tag]) => ({ title, lines: names.map((name) => line(title, tag, views.get(name).view)) })) });
  distmon.overlayCharts(build, charts);
  distmon.follow(views, (change, known) => { if (change.kind === "append") { distmon.append(known.view, change.data); distmon.refresh(); } });
};

distmon.theme();
(async () => {
  const main = document.getElementById("main");
  const names = new URLSearchParams(location.search).getAll("run");
  try {
    await (names.length ? distmon.livePage(names.slice(0, 8), main) : distmon.runList(main));
  } catch (error) {
    main.replaceChildren(distmon.el("p", { class: "problem" }, `Cannot show this: ${error.message}`), distmon.el("p", {}, distmon.el("a", { href: "/" }, "All runs")));
  }
})();
