const read = (id) => JSON.parse(document.getElementById(id)?.textContent ?? "{}");
const specs = read("specs");
const configs = read("configs");
const views = new Map();
let focus = "";

async function draw(box) {
  const mode = document.documentElement.dataset.mode;
  const options = { config: configs[mode], renderer: "svg", actions: false, tooltip: { theme: mode } };
  views.get(box)?.finalize();
  const { finalize, view } = await vegaEmbed(box, structuredClone(specs[box.dataset.chart]), options);
  views.set(box, { finalize, view });
  if (focus) await view.signal("focus", focus).runAsync();
}

async function drawAll() {
  document.documentElement.dataset.drawn = "no";
  for (const box of document.querySelectorAll(".chart")) await draw(box);
  document.documentElement.dataset.drawn = "yes";
}

function pick(name) {
  focus = focus === name ? "" : name;
  for (const button of document.querySelectorAll(".legend button")) {
    button.setAttribute("aria-pressed", String(button.dataset.recipe === focus));
  }
  document.querySelector(".legend")?.classList.toggle("picked", focus !== "");
  for (const { view } of views.values()) view.signal("focus", focus).runAsync();
}

function csv(name) {
  const tables = Object.values(specs[name].datasets).filter((table) => typeof table === "string");
  return tables.reduce((a, b) => (b.length > a.length ? b : a), "");
}

function openTarget() {
  const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  target.scrollIntoView();
}

for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => pick(button.dataset.recipe));
}
for (const link of document.querySelectorAll("a.csv")) {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    const url = URL.createObjectURL(new Blob([csv(link.dataset.chart)], { type: "text/csv" }));
    Object.assign(document.createElement("a"), { href: url, download: `${link.dataset.chart}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  });
}
for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
}
document.getElementById("mode").addEventListener("click", () => window.switchMode());
addEventListener("mode", drawAll);
addEventListener("hashchange", openTarget);
await drawAll();
openTarget();
