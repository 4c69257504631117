"use strict";
// Folding of the tree and zooming of the flame graphs; the page is complete without it.
document.querySelectorAll("[data-fold]").forEach((button) => button.addEventListener("click", () => {
  document.querySelectorAll(".tree details").forEach((one) => { one.open = button.dataset.fold === "open"; });
}));
document.querySelectorAll(".flame").forEach((flame) => {
  const bars = [...flame.children];
  const place = (from, width) => bars.forEach((bar) => {
    const left = (bar.dataset.x - from) / width, wide = bar.dataset.w / width;
    bar.style.left = (Math.max(0, left) * 100) + "%";
    bar.style.width = (Math.min(1, left + wide) - Math.max(0, left)) * 100 + "%";
    bar.classList.toggle("thin", wide < 0.012);
    bar.style.display = left + wide <= 1e-9 || left >= 1 - 1e-9 ? "none" : "";
  });
  let zoomed = null;
  flame.addEventListener("click", (event) => {
    const bar = event.target.closest(".flame > div");
    zoomed = !bar || bar === zoomed ? null : bar;
    if (zoomed) place(+zoomed.dataset.x, +zoomed.dataset.w); else place(0, 1);
  });
});
