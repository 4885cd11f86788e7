"use strict";
const chips = [...document.querySelectorAll(".chips input")];
const search = document.getElementById("search");
const found = document.getElementById("found");
const checks = [...document.querySelectorAll("details.check")];
const folds = [...document.querySelectorAll("details.passed, details.long")];
const rows = [...document.querySelectorAll(".panel tbody tr")];
const statuses = new Map(rows.map((row) => [row, [...row.querySelectorAll(".pill")].map((p) => p.textContent)]));

function apply() {
  const wanted = new Set(chips.filter((c) => c.checked).map((c) => c.value));
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const has = (element) => words.every((w) => element.textContent.toLowerCase().includes(w));
  let shown = 0;
  for (const check of checks) {
    check.hidden = !((check.dataset.status === "" || wanted.has(check.dataset.status)) && has(check));
    shown += check.hidden ? 0 : 1;
  }
  for (const row of rows) {
    const own = statuses.get(row);
    row.hidden = (own.length > 0 && !own.some((s) => wanted.has(s))) || (words.length > 0 && !has(row));
  }
  const isFiltered = words.length > 0 || chips.some((c) => !c.checked);
  for (const fold of folds) fold.open = isFiltered ? fold.querySelector("details.check:not([hidden]), tbody tr:not([hidden])") !== null : fold.open;
  found.textContent = `${shown} of ${checks.length} checks shown`;
}
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target && target.matches("details.check")) {
    target.hidden = false;
    target.open = true;
    if (target.parentElement.matches("details.passed")) target.parentElement.open = true;
    target.scrollIntoView({ block: "center" });
  }
}
for (const chip of chips) chip.addEventListener("change", apply);
search.addEventListener("input", apply);
addEventListener("hashchange", openTarget);
addEventListener("beforeprint", () => [...checks, ...folds].forEach((c) => { c.open = true; }));
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
});
for (const button of document.querySelectorAll(".cmd button")) {
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.parentElement.querySelector("pre").textContent);
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
}
const filters = document.querySelector(".filters");
filters.hidden = false;
if (matchMedia("(max-width: 940px)").matches) document.querySelector("section.stage").before(filters);
document.getElementById("theme").hidden = false;
apply();
openTarget();
