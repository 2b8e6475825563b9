// The comparison: everything is in the page.
distmon.theme();
(() => {
  const { el } = distmon;
  const view = JSON.parse(document.getElementById("view").textContent);
  const charts = el("div", { class: "charts" });
  const heading = (id, text) => el("h2", { id }, text);
  document.getElementById("main").replaceChildren(
    heading("verdicts", "Verdicts and differences"), ...view.comparisons.flatMap(distmon.comparisonNodes), heading("plots", "Plots"), charts);
  distmon.overlayCharts(() => view.overlay, charts);
  document.getElementById("run-name").textContent = "Comparison";
  document.title = `${view.overlay.runs.length} runs - distmon`;
  document.getElementById("sections").replaceChildren(el("a", { href: "#verdicts" }, "Verdicts"), el("a", { href: "#plots" }, "Plots"));
})();
