// The report: the view is in the page.
distmon.theme();
distmon.page = distmon.runPage(JSON.parse(document.getElementById("view").textContent), document.getElementById("main"));
