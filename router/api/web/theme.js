// Before the first paint: light or dark, as the system says or as was chosen here.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => localStorage.getItem("hackkv-theme");
  function apply() {
    const theme = chosen() ?? (system.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    document.dispatchEvent(new CustomEvent("theme", { detail: theme }));
  }
  const NEXT = { auto: "light", light: "dark", dark: "auto" };
  function label(button) {
    const now = chosen() ?? "auto";
    button.textContent = { auto: "Auto", light: "Light", dark: "Dark" }[now];
    button.setAttribute("aria-label", `Colours: ${{ auto: "as the system", light: "light", dark: "dark" }[now]}`);
  }
  system.addEventListener("change", apply);
  apply();
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme-button");
    label(button);
    button.addEventListener("click", () => {
      const next = NEXT[chosen() ?? "auto"];
      if (next === "auto") localStorage.removeItem("hackkv-theme");
      else localStorage.setItem("hackkv-theme", next);
      label(button);
      apply();
    });
  });
})();
