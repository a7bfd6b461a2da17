// What every page has: its root, a place for faults, and themes. A fault anywhere is shown on the
// page: an empty section must not pass for an empty result.

const page = document.documentElement;

function broken(reason) {
  const place = document.getElementById("broken");
  place.hidden = false;
  place.textContent = `Part of this report could not be drawn: ${reason}. The figures are in the CSV and the JSON beside it.`;
  page.dataset.state = "broken";
}
addEventListener("error", (event) => broken(event.message));
addEventListener("unhandledrejection", (event) => broken(event.reason?.message ?? event.reason));

function makeThemes(redraw) {
  const button = document.getElementById("theme");
  const themes = [["", "system"], ["light", "light"], ["dark", "dark"]];
  let at = 0;
  const wear = (theme) => { page.style.colorScheme = theme; redraw(); };
  button.addEventListener("click", () => {
    at = (at + 1) % themes.length;
    button.textContent = `theme: ${themes[at][1]}`;
    wear(themes[at][0]);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  // Paper is white, whatever the screen is.
  addEventListener("beforeprint", () => wear("light"));
  addEventListener("afterprint", () => wear(themes[at][0]));
}
