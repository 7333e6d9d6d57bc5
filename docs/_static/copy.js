// A button on each block of code that copies it, without prompts and without what it prints.
document.addEventListener("DOMContentLoaded", () => {
  if (!navigator.clipboard) return;  // a page that is not served by https
  for (const block of document.querySelectorAll("div.highlight")) {
    const button = document.createElement("button");
    button.className = "copy";
    button.textContent = "copy";
    button.addEventListener("click", () => {
      const lines = block.querySelector("pre").innerText.split("\n");
      const code = lines.filter((line) => /^(>>>|\.\.\.)( |$)/.test(line));
      navigator.clipboard.writeText((code.length ? code.map((line) => line.slice(4)) : lines).join("\n"));
      button.textContent = "copied";
      setTimeout(() => (button.textContent = "copy"), 1500);
    });
    block.style.position = "relative";
    block.append(button);
  }
});
