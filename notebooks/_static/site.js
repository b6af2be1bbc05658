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
