// Copies a secret. Where the browser has no clipboard for us (plain HTTP on a network), the text is selected instead.
"use strict";

for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", async () => {
        const source = document.getElementById(button.dataset.copy);
        getSelection().selectAllChildren(source);
        try {
            await navigator.clipboard.writeText(source.textContent);
            button.textContent = button.dataset.copied;
        } catch {
            button.textContent = button.dataset.selected;
        }
    });
}
