"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const shown = { format: data.format, product: "worst" };
  const products = { worst: "the lower of both", output: "output", weight_gradient: "weight gradient" };
  const table = document.getElementById("map");

  const element = (name, text, parent) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  };

  const ratio = (cell) => {
    const found = (shown.product === "worst" ? ["output", "weight_gradient"] : [shown.product])
      .map((product) => cell[product][shown.format]).filter((value) => value !== null && value !== undefined);
    return found.length ? Math.min(...found) : null;
  };

  // From dark red (0 dB) over yellow (the bound) to blue (twice the bound): readable without red and green apart.
  const color = (value) => {
    const share = Math.max(0, Math.min(1, value / (2 * data.bound)));
    const from = share < 0.5 ? [214, 96, 77] : [253, 231, 150];
    const to = share < 0.5 ? [253, 231, 150] : [146, 197, 222];
    const part = share < 0.5 ? 2 * share : 2 * share - 1;
    return `rgb(${from.map((each, i) => Math.round(each + part * (to[i] - each))).join(",")})`;
  };

  const draw = () => {
    table.replaceChildren();
    const head = element("tr", undefined, element("thead", undefined, table));
    element("th", "step", head).scope = "col";
    for (const step of data.steps) element("th", step, head).scope = "col";
    const body = element("tbody", undefined, table);
    for (const layer of data.layers) {
      const row = element("tr", undefined, body);
      element("th", layer.name, row).scope = "row";
      const cells = new Map(layer.steps.map((each) => [each.step, each]));
      for (const step of data.steps) {
        const made = element("td", undefined, row);
        const value = cells.has(step) ? ratio(cells.get(step)) : null;
        if (value === null) continue;
        made.textContent = value.toFixed(0);
        made.title = `${layer.name}, step ${step}: ${value.toFixed(1)} dB`;
        made.style.background = color(value);
        made.classList.toggle("below", value < data.bound);
      }
    }
  };

  const choices = (id, names, key) => {
    const group = document.getElementById(id);
    for (const [name, label] of Object.entries(names)) {
      const button = element("button", label, group);
      button.type = "button";
      button.setAttribute("aria-pressed", String(shown[key] === name));
      button.addEventListener("click", () => {
        shown[key] = name;
        for (const other of group.children) other.setAttribute("aria-pressed", String(other === button));
        draw();
      });
    }
  };

  choices("formats", data.formats, "format");
  choices("products", products, "product");
  const scale = document.getElementById("scale");
  for (let i = 0; i <= 4; i += 1) {
    element("span", `${(i * data.bound / 2).toFixed(0)} dB`, scale).style.background = color(i * data.bound / 2);
  }
  document.getElementById("controls").hidden = false;
  draw();
})();
