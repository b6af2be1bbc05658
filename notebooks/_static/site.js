// Show the entry of this page in the sidebar, which is longer than the screen.
document.addEventListener("DOMContentLoaded", () => {
    const scroll = document.querySelector(".sidebar-scroll");
    const entry = document.querySelector(".sidebar-tree .current-page");
    if (scroll && entry) {
        const offset = entry.getBoundingClientRect().top - scroll.getBoundingClientRect().top;
        const middle = offset - (scroll.clientHeight - entry.clientHeight) / 2;
        scroll.scrollTo({ top: middle, behavior: "instant" });
    }
});

// In tables, a long piece of code may break after "|", "," and "(": --engine auto|fork|spawn|...
document.addEventListener("DOMContentLoaded", () => {
    for (const word of document.querySelectorAll("article td code.literal span.pre")) {
        const parts = word.textContent.split(/(?<=[|,(])(?=.)/);
        if (word.textContent.length > 20 && parts.length > 1) {
            const pieces = parts.map((part) => {
                const piece = word.cloneNode(false);
                piece.textContent = part;
                return piece;
            });
            word.replaceWith(...pieces.flatMap((piece) => [document.createElement("wbr"), piece]));
        }
    }
});
