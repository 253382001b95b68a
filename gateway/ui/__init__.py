"""Serves the page for people at /ui of the HTTP port: chat, and a live picture of the cluster.

cluster_picture.py  what the picture shows, made of two readings of the cluster; open this first
cluster_figures.py  rates, shares and quantiles between two readings
ui_files.py         the page's files, and the headers that they are sent with
ui_api.py           the handlers, and their rows in the table of the HTTP port
page/               the page itself: HTML, CSS and JavaScript modules that load nothing from elsewhere; markdown-it.js
                    is another project's file, unchanged, whose licences are in markdown-it.LICENSE
"""
