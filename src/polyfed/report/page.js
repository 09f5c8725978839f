const button = (text, act) => {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.addEventListener("click", () => act(made));
  return made;
};

for (const table of document.querySelectorAll("table")) {
  const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent);
  for (const cell of table.querySelectorAll("tbody td")) cell.dataset.head = heads[cell.cellIndex];
  const body = table.tBodies[0];
  if (body.rows.length < 3 || body.rows[0].cells.length < 3) continue;
  table.querySelectorAll("thead th").forEach((head, column) => {
    const sort = () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of table.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.v;
      const order = (a, b) => {
        const x = key(a), y = key(b);
        if (x === "" || y === "") return (x === "") - (y === "");
        const d = isNaN(x) || isNaN(y) ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
        return up ? d : -d;
      };
      body.append(...[...body.rows].sort(order));
    };
    head.replaceChildren(button(head.textContent, sort));
  });
}

const download = (name, type, text) => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
};

const copy = async (text) => {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // a page from a server without TLS has no clipboard
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
};

for (const part of document.querySelectorAll(".table")) {
  const text = (form) => part.querySelector(`template.${form}`).content.textContent;
  const save = () => download(`${part.dataset.name}.csv`, "text/csv", text("csv"));
  const tools = document.createElement("p");
  tools.className = "tools";
  tools.append(button("Download CSV", save), button("Copy LaTeX", async (self) => {
    await copy(text("latex"));
    self.textContent = "Copied";
    setTimeout(() => { self.textContent = "Copy LaTeX"; }, 1500);
  }));
  part.querySelector(".scroll").after(tools);
}

for (const drawn of document.querySelectorAll("figure[data-name]")) {
  const save = () => {  // with the page's colours, which the file would lack
    const colours = getComputedStyle(document.documentElement);
    const whole = drawn.querySelector("template");
    const copied = (whole ? whole.content : drawn).querySelector("svg").cloneNode(true);
    copied.style.background = colours.getPropertyValue("--paper");
    const text = new XMLSerializer().serializeToString(copied);
    const filled = text.replace(/var\((--[a-z]+)\)/g, (_, name) => colours.getPropertyValue(name).trim());
    download(`${drawn.dataset.name}.svg`, "image/svg+xml", filled);
  };
  const tools = document.createElement("p");
  tools.className = "tools";
  tools.append(button("Download SVG", save));
  drawn.append(tools);
}
