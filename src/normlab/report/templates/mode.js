// Before the first paint: the mode the reader chose, else the system's.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const apply = () => {
    const mode = chosen ?? (system.matches ? "dark" : "light");
    document.documentElement.dataset.mode = mode;
    dispatchEvent(new CustomEvent("mode", { detail: mode }));
  };
  system.addEventListener("change", apply);
  window.switchMode = () => {
    chosen = document.documentElement.dataset.mode === "dark" ? "light" : "dark";
    apply();
  };
  apply();
})();
